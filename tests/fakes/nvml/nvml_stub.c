/* A stub of libnvidia-ml.so.1, driven by a text file; tests load it through the real nvidia-ml-py.
 *
 * NVML_STUB_FILE     the driving file, read again whenever it changes; %h in it stands for the host name
 * NVML_STUB_DEVICES  how many devices to simulate if that file is missing (default 0); their UUIDs derive from the
 *                    host name, and their values vary with time
 *
 * Lines of the file; '#' starts a comment:
 *   driver VERSION
 *   device I KEY VALUE     I: any number below 64; a device exists once a line names it
 *   fail I FUNCTION CODE [FROM [UNTIL]]
 *                          FUNCTION as NVML exports it, or field:N for one of nvmlDeviceGetFieldValues, or *;
 *                          I: a number, or * for every device and for calls without a device;
 *                          FROM, UNTIL: seconds; always if omitted. `fail 2 * 15 60 90`: GPU 2 is lost for 30 s
 *
 * A load over time. T is in seconds since the process first read the file, or since `start`:
 *   start EPOCH            T = 0 is at EPOCH, seconds since 1970, so that all processes and nodes see the same load
 *   at I KEY T VALUE       the value is VALUE from T on
 *   ramp I KEY T VALUE     it changes linearly from its last value to VALUE at T
 *   event I T xid NUMBER   an XID error at T; `event I T sbe`, `event I T dbe`: a single-bit or double-bit ECC error.
 *                          Each event set that existed before gets it once
 *   loop S                 T restarts at 0 every S seconds; events happen only in the first round
 *
 * Text KEYs: uuid name. Constants (device): minor, parent (for a MIG slice, the number of its GPU), gpu_instance (of
 * the slice), bus (of PCI, in hex), nvswitch (1), nvlink5 (1: the field numbers of that generation), cluster, clique,
 * gpm (1: also set by any *_activity), events (mask of supported types; 11), narrow (1: PCIe counters of 32 bits).
 * Values, which at and ramp may change: memory_total memory_used memory_reserved (bytes), utilization memory_busy (%),
 * power (mW), temperature memory_temperature (°C), sm_clock memory_clock (MHz), reasons (mask of throttle
 * reasons), sm_activity tensor_activity dram_activity (%), processes, ecc_corrected ecc_uncorrected, remapped
 * remap_pending remap_failed, nvlinks nvlinks_active nvlink_errors, pcie_replays.
 * Counters: energy (mJ), pcie_tx pcie_rx nvlink_tx nvlink_rx (bytes). If not set, a counter is the integral of its
 * rate: power, pcie_tx_rate pcie_rx_rate nvlink_tx_rate nvlink_rx_rate (bytes/s), and continues after the file is
 * replaced.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_DEVICES 64
#define SETS 16
#define ANY -1

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, TIMED_OUT = 10,
    MISMATCH = 25, UNKNOWN = 999
};

typedef unsigned long long u64;

enum {
    MINOR, PARENT, GPU_INSTANCE, NVSWITCH, NVLINK5, CLUSTER, CLIQUE, GPM, EVENTS, NARROW, MEMORY_TOTAL, MEMORY_USED,
    MEMORY_RESERVED, UTILIZATION, MEMORY_BUSY, POWER, TEMPERATURE, MEMORY_TEMPERATURE, SM_CLOCK, MEMORY_CLOCK, REASONS,
    SM_ACTIVITY, TENSOR_ACTIVITY, DRAM_ACTIVITY, PROCESSES, ECC_CORRECTED, ECC_UNCORRECTED, REMAPPED, REMAP_PENDING,
    REMAP_FAILED, NVLINKS, NVLINKS_ACTIVE, NVLINK_ERRORS, PCIE_REPLAYS, ENERGY, PCIE_TX, PCIE_RX, NVLINK_TX, NVLINK_RX,
    PCIE_TX_RATE, PCIE_RX_RATE, NVLINK_TX_RATE, NVLINK_RX_RATE, KEYS
};
static const char *const names[KEYS] = {
    "minor", "parent", "gpu_instance", "nvswitch", "nvlink5", "cluster", "clique", "gpm", "events", "narrow",
    "memory_total",
    "memory_used", "memory_reserved", "utilization", "memory_busy", "power", "temperature", "memory_temperature",
    "sm_clock", "memory_clock", "reasons", "sm_activity", "tensor_activity", "dram_activity", "processes",
    "ecc_corrected", "ecc_uncorrected", "remapped", "remap_pending", "remap_failed", "nvlinks", "nvlinks_active",
    "nvlink_errors", "pcie_replays", "energy", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx", "pcie_tx_rate",
    "pcie_rx_rate", "nvlink_tx_rate", "nvlink_rx_rate",
};
#define COUNTERS 5 /* from ENERGY on; each is the integral of its rate if it is not set */
static const int rate_of[COUNTERS] = {POWER, PCIE_TX_RATE, PCIE_RX_RATE, NVLINK_TX_RATE, NVLINK_RX_RATE};
#define UNSET NAN

typedef struct { double t, value; int ramp; } Point;
typedef struct { int count; Point *points; } Track; /* a value over time; without points: its base */
typedef struct {
    int exists, index, bus;
    char uuid[96], name[96];
    double base[KEYS], carried[COUNTERS];
    Track track[KEYS];
} Device;
typedef struct { int device, code; char function[64]; double from, until; } Failure;
typedef struct { int device, type; double t; u64 data; } Event;
typedef struct { int used; u64 mask[MAX_DEVICES]; double created; unsigned char reported[1024]; } EventSet;

static Device devices[MAX_DEVICES];
static Failure failures[256];
static Event events[1024];
static EventSet sets[SETS];
static int failure_count, event_count, init_count, synthetic, live_samples;
static double origin, period;
static char driver[80];
static struct stat last_stat;
static char host[256];

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static double value_at(int i, int key, double t) {
    Track *track = &devices[i].track[key];
    double value = devices[i].base[key], since = 0;
    for (int n = 0; n < track->count; n++) {
        Point *p = &track->points[n];
        if (t < p->t) return p->ramp ? value + (p->value - value) * (t - since) / (p->t - since) : value;
        value = p->value;
        since = p->t;
    }
    return value;
}

static double integral_once(int i, int key, double t) {
    Track *track = &devices[i].track[key];
    double value = devices[i].base[key], since = 0, sum = 0;
    for (int n = 0; n < track->count && since < t; n++) {
        Point *p = &track->points[n];
        double until = fmin(t, p->t), last = value_at(i, key, until);
        sum += (until - since) * (p->ramp ? (value + (t < p->t ? last : p->value)) / 2 : value);
        value = p->value;
        since = p->t;
    }
    return sum + fmax(0, t - since) * value;
}

static double now_in_load(void) {
    double t = fmax(0, seconds() - origin);
    return period > 0 ? fmod(t, period) : t;
}

/* The activities of simulated devices follow their utilization, which is 75 + 20 sin(t/7 + i). */
static double integral(int i, int key) {
    double t = seconds();
    if (synthetic) return 0.8 * (75 * t - 140 * cos(t / 7 + i));
    t = fmax(0, t - origin);
    double rounds = period > 0 ? floor(t / period) : 0;
    return rounds * integral_once(i, key, period) + integral_once(i, key, t - rounds * period);
}

static double value_now(int i, int key) { return value_at(i, key, now_in_load()); }

static double counter(int i, int key) {
    double set = value_now(i, key);
    return isnan(set) ? devices[i].carried[key - ENERGY] + integral(i, rate_of[key - ENERGY]) : set;
}

static int slice(int i) { return devices[i].base[PARENT] >= 0; }

static void plain_device(int i) {
    Device *d = &devices[i];
    uint64_t hash = 1469598103934665603ULL;
    for (const char *c = host; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ULL;
    d->exists = 1;
    double *b = d->base;
    b[MINOR] = i;
    b[PARENT] = -1;
    b[EVENTS] = 11;
    b[MEMORY_TOTAL] = 80.0 * (1 << 30);
    b[MEMORY_USED] = 1 << 30;
    b[MEMORY_RESERVED] = 500.0 * (1 << 20);
    b[MEMORY_BUSY] = UNSET;
    b[POWER] = 70000;
    b[TEMPERATURE] = 30;
    b[MEMORY_TEMPERATURE] = 40;
    b[SM_CLOCK] = 345;
    b[MEMORY_CLOCK] = 2619;
    for (int k = ENERGY; k < ENERGY + COUNTERS; k++) b[k] = UNSET;
    snprintf(d->uuid, sizeof d->uuid, "GPU-%08x-%04x-%04x-%04x-%012x", (unsigned)(hash >> 32),
             (unsigned)(hash >> 16 & 0xffff), (unsigned)(hash & 0xffff), 0x8000, i);
    snprintf(d->name, sizeof d->name, "NVIDIA H100 80GB HBM3 (stub)");
}

static int key_of(const char *key) {
    for (int k = 0; k < KEYS; k++)
        if (!strcmp(key, names[k])) return k;
    fprintf(stderr, "nvml_stub: unknown key %s\n", key);
    return -1;
}

static Device *device_of(int i) {
    if (i < 0 || i >= MAX_DEVICES) return NULL;
    if (!devices[i].exists) plain_device(i);
    return &devices[i];
}

static void set_value(int i, const char *key, const char *value) {
    Device *d = device_of(i);
    if (!d) return;
    if (!strcmp(key, "uuid")) snprintf(d->uuid, sizeof d->uuid, "%s", value);
    else if (!strcmp(key, "name")) snprintf(d->name, sizeof d->name, "%s", value);
    else if (!strcmp(key, "bus")) d->bus = (int)strtol(value, NULL, 16);
    else {
        int k = key_of(key);
        if (k < 0) return;
        d->base[k] = strtod(value, NULL);
        if (k == NVLINKS) d->base[NVLINKS_ACTIVE] = d->base[k];
        if (k >= SM_ACTIVITY && k <= DRAM_ACTIVITY) d->base[GPM] = 1;
    }
}

static void add_point(int i, const char *key, double t, const char *value, int ramp) {
    Device *d = device_of(i);
    int k = d ? key_of(key) : -1;
    if (k < 0) return;
    Track *track = &d->track[k];
    track->points = realloc(track->points, (size_t)(track->count + 1) * sizeof(Point));
    track->points[track->count++] = (Point){t, strtod(value, NULL), ramp};
    if (k >= SM_ACTIVITY && k <= DRAM_ACTIVITY) d->base[GPM] = 1;
}

static void parse(FILE *f) {
    char line[512], a[64], b[64], c[64];
    double t;
    int value_at_char;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "#\n")] = 0;
        if (sscanf(line, " driver %79s", driver) == 1) continue;
        if (sscanf(line, " start %lf", &origin) == 1) continue;
        if (sscanf(line, " loop %lf", &period) == 1) continue;
        if (sscanf(line, " device %63s %63s %n", a, b, &value_at_char) == 2) {
            set_value(atoi(a), b, line + value_at_char);
            continue;
        }
        if (sscanf(line, " at %63s %63s %lf %63s", a, b, &t, c) == 4) {
            add_point(atoi(a), b, t, c, 0);
            continue;
        }
        if (sscanf(line, " ramp %63s %63s %lf %63s", a, b, &t, c) == 4) {
            add_point(atoi(a), b, t, c, 1);
            continue;
        }
        Event *e = &events[event_count];
        int fields = event_count < 1024 ? sscanf(line, " event %63s %lf %63s %llu", a, &e->t, b, &e->data) : 0;
        if (fields >= 3) {
            e->device = atoi(a);
            e->type = !strcmp(b, "xid") ? 8 : !strcmp(b, "dbe") ? 2 : 1;
            if (fields == 3) e->data = 0;
            if (device_of(e->device)) event_count++;
            continue;
        }
        Failure *x = &failures[failure_count];
        x->from = 0;
        x->until = INFINITY;
        if (failure_count < 256 &&
            sscanf(line, " fail %63s %63s %d %lf %lf", a, x->function, &x->code, &x->from, &x->until) >= 3) {
            x->device = strcmp(a, "*") ? atoi(a) : ANY;
            failure_count++;
        }
    }
}

static void synthesize(int force) {
    static double last;
    double t = seconds();
    if (!force && fabs(t - last) < 0.01) return; /* keeps the stub's own cost out of measurements with these devices */
    last = t;
    for (int i = 0; i < MAX_DEVICES; i++) {
        if (!devices[i].exists) continue;
        double *b = devices[i].base;
        b[UTILIZATION] = floor(75 + 20 * sin(t / 7 + i));
        b[MEMORY_USED] = (40.0 + i) * (1 << 30);
        b[POWER] = 100000 + 5000 * b[UTILIZATION];
        b[ENERGY] = t * 475000; /* the mean of that power, since 1970 */
        b[TEMPERATURE] = 40 + floor(b[UTILIZATION] / 4);
        b[MEMORY_TEMPERATURE] = b[TEMPERATURE] + 10;
        b[SM_CLOCK] = 1980;
        b[GPM] = b[PROCESSES] = 1;
        b[NVLINKS] = b[NVLINKS_ACTIVE] = 18;
        b[PCIE_TX] = b[PCIE_RX] = (t - 1.7e9) * 1e9;
        b[NVLINK_TX] = b[NVLINK_RX] = (t - 1.7e9) * 2e10;
    }
}

static void number_devices(void) {
    int next = 0;
    for (int i = 0; i < MAX_DEVICES; i++)
        if (devices[i].exists && !slice(i)) devices[i].index = next++;
}

static void forget(int keep_counters) {
    double carried[MAX_DEVICES][COUNTERS] = {0};
    for (int i = 0; i < MAX_DEVICES; i++) {
        if (!devices[i].exists) continue;
        for (int k = 0; keep_counters && k < COUNTERS; k++) carried[i][k] = counter(i, ENERGY + k);
        for (int k = 0; k < KEYS; k++) free(devices[i].track[k].points);
    }
    memset(devices, 0, sizeof devices);
    for (int i = 0; i < MAX_DEVICES; i++) memcpy(devices[i].carried, carried[i], sizeof carried[i]);
    for (int s = 0; s < SETS; s++) memset(sets[s].reported, 0, sizeof sets[s].reported);
    failure_count = event_count = 0;
    period = 0;
    origin = seconds();
    strcpy(driver, "570.00.stub");
}

static void path_of(char *path, size_t size) {
    const char *name = getenv("NVML_STUB_FILE");
    if (!host[0]) gethostname(host, sizeof host - 1);
    for (size_t n = 0; name && *name && n + sizeof host < size; name++) {
        if (name[0] == '%' && name[1] == 'h') {
            n += (size_t)snprintf(path + n, size - n, "%s", host);
            name++;
        } else {
            path[n++] = *name;
            path[n] = 0;
        }
    }
}

static void refresh(void) {
    char path[4096] = "";
    path_of(path, sizeof path);
    struct stat now;
    if (!path[0] || stat(path, &now)) {
        int is_first = !synthetic;
        if (is_first) {
            const char *count = getenv("NVML_STUB_DEVICES");
            forget(0);
            memset(&last_stat, 0, sizeof last_stat);
            for (int i = 0; i < MAX_DEVICES && count && i < atoi(count); i++) plain_device(i);
            number_devices();
        }
        synthetic = 1;
        synthesize(is_first);
        return;
    }
    if (!synthetic && now.st_ino == last_stat.st_ino && now.st_size == last_stat.st_size &&
        !memcmp(&now.st_mtim, &last_stat.st_mtim, sizeof now.st_mtim))
        return;
    FILE *f = fopen(path, "r");
    if (!f) return; /* being replaced: the next call reads it */
    forget(!synthetic);
    synthetic = 0;
    parse(f);
    number_devices();
    last_stat = now;
    fclose(f);
}

static int failure(const char *function, int device) {
    double t = failure_count ? now_in_load() : 0;
    for (int i = 0; i < failure_count; i++) {
        Failure *x = &failures[i];
        if ((x->device == ANY || x->device == device) && t >= x->from && t < x->until &&
            (!strcmp(x->function, "*") || !strcmp(x->function, function)))
            return x->code;
    }
    return OK;
}

static int begin(const char *function, int device) {
    refresh();
    return init_count ? failure(function, device) : UNINITIALIZED;
}

static int copy_text(char *out, unsigned size, const char *text) {
    if (strlen(text) >= size) return SMALL;
    strcpy(out, text);
    return OK;
}

/* A handle is the device's number plus one, so that no handle is NULL. */
static int number_of(void *handle) { return (int)(intptr_t)handle - 1; }

/* Blank values of a broken driver are far above the range of the type. */
static unsigned narrow(double value) { return value < 0 ? 0 : value > 4294967295.0 ? 4294967295u : (unsigned)value; }

#define BEGIN(i)                                                             \
    int i = number_of(handle);                                               \
    int bad = begin(__func__, i);                                            \
    if (bad) return bad;                                                     \
    if (i < 0 || i >= MAX_DEVICES || !devices[i].exists) return INVALID_ARGUMENT;
#define NOT_A_SLICE(i) if (slice(i)) return NOT_SUPPORTED;

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    refresh();
    int bad = failure(__func__, ANY);
    if (!bad) init_count++;
    return bad;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!init_count) return UNINITIALIZED;
    init_count--;
    return OK;
}

const char *nvmlErrorString(int code) { return code ? "an error of the stub" : "Success"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    int bad = begin(__func__, ANY);
    return bad ? bad : copy_text(out, size, driver);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int bad = begin(__func__, ANY);
    *count = 0;
    for (int i = 0; i < MAX_DEVICES; i++) *count += devices[i].exists && !slice(i);
    return bad;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    refresh();
    for (int i = 0; i < MAX_DEVICES; i++)
        if (devices[i].exists && !slice(i) && devices[i].index == (int)index) {
            *handle = (void *)(intptr_t)(i + 1);
            return begin(__func__, i);
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    refresh();
    for (int i = 0; i < MAX_DEVICES; i++)
        if (devices[i].exists && !strcmp(devices[i].uuid, uuid)) {
            *handle = (void *)(intptr_t)(i + 1);
            return begin(__func__, i);
        }
    return init_count ? NOT_FOUND : UNINITIALIZED;
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) { BEGIN(i) return copy_text(out, size, devices[i].uuid); }
int nvmlDeviceGetName(void *handle, char *out, unsigned size) { BEGIN(i) return copy_text(out, size, devices[i].name); }

int nvmlDeviceGetMinorNumber(void *handle, unsigned *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = (unsigned)devices[i].base[MINOR];
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, u64 out[3]) { /* total, free, used */
    BEGIN(i)
    out[0] = (u64)value_now(i, MEMORY_TOTAL);
    out[2] = (u64)(value_now(i, MEMORY_USED) + value_now(i, MEMORY_RESERVED));
    out[1] = out[0] - out[2];
    return OK;
}

typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *out) {
    BEGIN(i)
    if (out->version != (sizeof(MemoryV2) | 2u << 24)) return MISMATCH;
    out->total = (u64)value_now(i, MEMORY_TOTAL);
    out->reserved = (u64)value_now(i, MEMORY_RESERVED);
    out->used = (u64)value_now(i, MEMORY_USED);
    out->free = out->total - out->used - out->reserved;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned out[2]) { /* gpu, memory */
    BEGIN(i) NOT_A_SLICE(i)
    double memory = value_now(i, MEMORY_BUSY);
    out[0] = narrow(value_now(i, UTILIZATION));
    out[1] = isnan(memory) ? out[0] / 2 : narrow(memory);
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = narrow(value_now(i, POWER));
    return OK;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = 700000;
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, u64 *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = (u64)counter(i, ENERGY);
    return OK;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
    (void)sensor;
    BEGIN(i) NOT_A_SLICE(i)
    *out = narrow(value_now(i, TEMPERATURE));
    return OK;
}

typedef struct { unsigned version; int sensor, temperature; } TemperatureV1;
int nvmlDeviceGetTemperatureV(void *handle, TemperatureV1 *out) {
    BEGIN(i) NOT_A_SLICE(i)
    if (out->version != (sizeof(TemperatureV1) | 1u << 24)) return MISMATCH;
    out->temperature = (int)fmin(value_now(i, TEMPERATURE), INT32_MAX);
    return OK;
}

int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = narrow(value_now(i, kind == 2 ? MEMORY_CLOCK : SM_CLOCK));
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, u64 *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = (u64)value_now(i, REASONS);
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, u64 *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = (u64)value_now(i, REASONS);
    return OK;
}

typedef struct { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; } Process;
static int processes(int i, unsigned *count, Process *out) {
    unsigned total = narrow(value_now(i, PROCESSES)), capacity = *count;
    *count = total;
    if (total > capacity) return SMALL;
    for (unsigned n = 0; n < total; n++) out[n] = (Process){.pid = 1000 + n, .memory = 1 << 30};
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *out) {
    BEGIN(i)
    return processes(i, count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, Process *out) {
    BEGIN(i)
    return processes(i, count, out);
}

int nvmlDeviceGetTotalEccErrors(void *handle, int uncorrected, int aggregate, u64 *out) {
    BEGIN(i) NOT_A_SLICE(i)
    if (aggregate) return NOT_SUPPORTED;
    *out = (u64)value_now(i, uncorrected ? ECC_UNCORRECTED : ECC_CORRECTED);
    return OK;
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    BEGIN(i) NOT_A_SLICE(i)
    *corrected = 0;
    *uncorrected = narrow(value_now(i, REMAPPED));
    *pending = value_now(i, REMAP_PENDING) > 0;
    *failed = value_now(i, REMAP_FAILED) > 0;
    return OK;
}

int nvmlDeviceGetPcieReplayCounter(void *handle, unsigned *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = narrow(value_now(i, PCIE_REPLAYS));
    return OK;
}

typedef struct {
    uint32_t id, scope;
    int64_t timestamp, latency;
    int type, result; /* type: 1: 32-bit unsigned, 3: 64-bit */
    union { double d; unsigned ui; u64 ull; } value;
} FieldValue;

static int field_value(int i, FieldValue *out) {
    char name[32];
    snprintf(name, sizeof name, "field:%u", out->id);
    int bad = failure(name, i);
    if (bad) return bad;
    int linked = value_now(i, NVLINKS) > 0 && out->scope == UINT32_MAX, fifth = devices[i].base[NVLINK5] > 0;
    out->type = 3;
    switch (out->id) {
    case 82: out->type = 1; out->value.ui = narrow(value_now(i, MEMORY_TEMPERATURE)); return OK;
    case 83: out->value.ull = (u64)counter(i, ENERGY); return OK;
    case 197: case 198:
        out->value.ull = (u64)counter(i, out->id == 197 ? PCIE_TX : PCIE_RX);
        if (devices[i].base[NARROW] > 0) {
            out->type = 1;
            out->value.ull &= UINT32_MAX;
        }
        return OK;
    case 138: case 139: /* KiB, up to the fourth generation */
        if (!linked || fifth) return NOT_SUPPORTED;
        out->value.ull = (u64)(counter(i, out->id == 138 ? NVLINK_TX : NVLINK_RX) / 1024);
        return OK;
    case 202: case 204: /* bytes, from the fifth generation on */
        if (!linked || !fifth) return NOT_SUPPORTED;
        out->value.ull = (u64)counter(i, out->id == 202 ? NVLINK_TX : NVLINK_RX);
        return OK;
    case 161: case 162: case 163: /* replays, recoveries, CRC errors */
        if (!linked || fifth) return NOT_SUPPORTED;
        out->value.ull = out->id == 161 ? (u64)value_now(i, NVLINK_ERRORS) : 0;
        return OK;
    case 211: case 215: /* link integrity errors, recoveries */
        if (!linked || !fifth) return NOT_SUPPORTED;
        out->value.ull = out->id == 211 ? (u64)value_now(i, NVLINK_ERRORS) : 0;
        return OK;
    default: return NOT_SUPPORTED;
    }
}

int nvmlDeviceGetFieldValues(void *handle, int count, FieldValue *values) {
    BEGIN(i) NOT_A_SLICE(i)
    for (int n = 0; n < count; n++) values[n].result = field_value(i, &values[n]);
    return OK;
}

/* GPM. A sample holds the integrals of the activities; the metrics are their means between two samples. */
typedef struct { int device; double t, sum[4]; } Sample;
static const int activities[4] = {UTILIZATION, SM_ACTIVITY, TENSOR_ACTIVITY, DRAM_ACTIVITY};
static const unsigned metrics[4] = {1, 2, 5, 10};

typedef struct { unsigned version, supported; } GpmSupport;
int nvmlGpmQueryDeviceSupport(void *handle, GpmSupport *out) {
    BEGIN(i)
    if (out->version != 1) return MISMATCH;
    out->supported = devices[i].base[GPM] > 0;
    return OK;
}

int nvmlGpmSampleAlloc(Sample **out) {
    *out = calloc(1, sizeof **out);
    live_samples++;
    return OK;
}
int nvmlGpmSampleFree(Sample *sample) {
    free(sample);
    live_samples--;
    return OK;
}
int nvml_stub_live_samples(void) { return live_samples; } /* for tests; NVML has no such call */

static int take(int i, Sample *out) {
    if (!(devices[i].base[GPM] > 0)) return NOT_SUPPORTED;
    out->device = i;
    out->t = seconds();
    for (int n = 0; n < 4; n++) out->sum[n] = integral(i, activities[n]);
    return OK;
}
int nvmlGpmSampleGet(void *handle, Sample *out) {
    BEGIN(i) NOT_A_SLICE(i)
    return take(i, out);
}
int nvmlGpmMigSampleGet(void *handle, unsigned instance, Sample *out) {
    BEGIN(i) NOT_A_SLICE(i)
    for (int n = 0; n < MAX_DEVICES; n++)
        if (devices[n].exists && devices[n].base[PARENT] == i && devices[n].base[GPU_INSTANCE] == instance)
            return take(n, out);
    return NOT_FOUND;
}

typedef struct { unsigned id; int result; double value; const char *names[3]; } Metric;
typedef struct { unsigned version, count; Sample *a, *b; Metric metric[1]; } Metrics;
int nvmlGpmMetricsGet(Metrics *out) {
    refresh();
    if (out->version != 1) return MISMATCH;
    Sample *a = out->a, *b = out->b;
    int bad = failure(__func__, a->device);
    if (bad) return bad;
    for (unsigned n = 0; n < out->count; n++) {
        Metric *m = &out->metric[n];
        m->result = a->device != b->device ? INVALID_ARGUMENT : b->t - a->t < 0.095 ? UNKNOWN : NOT_SUPPORTED;
        for (int k = 0; m->result == NOT_SUPPORTED && k < 4; k++)
            if (metrics[k] == m->id) {
                m->value = (b->sum[k] - a->sum[k]) / (b->t - a->t);
                m->result = OK;
            }
    }
    return OK;
}

/* Events. */
int nvmlEventSetCreate(EventSet **out) {
    int bad = begin(__func__, ANY);
    if (bad) return bad;
    for (int s = 0; s < SETS; s++)
        if (!sets[s].used) {
            sets[s] = (EventSet){.used = 1, .created = seconds()};
            *out = &sets[s];
            return OK;
        }
    return UNKNOWN;
}
int nvmlEventSetFree(EventSet *set) {
    set->used = 0;
    return OK;
}
int nvmlDeviceGetSupportedEventTypes(void *handle, u64 *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = (u64)devices[i].base[EVENTS];
    return OK;
}
int nvmlDeviceRegisterEvents(void *handle, u64 types, EventSet *set) {
    BEGIN(i) NOT_A_SLICE(i)
    if (types & ~(u64)devices[i].base[EVENTS]) return NOT_SUPPORTED;
    set->mask[i] |= types;
    return OK;
}

typedef struct { void *device; u64 type, data; unsigned gpu_instance, compute_instance; } EventData;
int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms) {
    for (double until = seconds() + timeout_ms / 1e3;; usleep(1000)) {
        int bad = begin(__func__, ANY);
        if (bad) return bad;
        for (int i = 0; i < MAX_DEVICES; i++)
            if (set->mask[i] && (bad = failure("nvmlEventSetWait_v2", i))) return bad;
        for (int n = 0; n < event_count; n++) {
            Event *e = &events[n];
            double at = origin + e->t;
            if (set->reported[n] || at > seconds() || at < set->created) continue;
            int board = slice(e->device) ? (int)devices[e->device].base[PARENT] : e->device;
            if (!(set->mask[board] & (u64)e->type)) continue;
            set->reported[n] = 1;
            unsigned instance = slice(e->device) ? (unsigned)devices[e->device].base[GPU_INSTANCE] : UINT32_MAX;
            *out = (EventData){(void *)(intptr_t)(board + 1), (u64)e->type, e->data, instance, UINT32_MAX};
            return OK;
        }
        if (seconds() >= until) return TIMED_OUT;
    }
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} PciInfo;
int nvmlDeviceGetPciInfo_v3(void *handle, PciInfo *out) {
    BEGIN(i)
    *out = (PciInfo){.bus = (unsigned)devices[i].bus};
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", devices[i].bus);
    return OK;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
    BEGIN(i)
    if (value_now(i, NVLINKS) <= 0) return NOT_SUPPORTED;
    if ((int)link >= (int)value_now(i, NVLINKS)) return INVALID_ARGUMENT;
    *active = (int)link < (int)value_now(i, NVLINKS_ACTIVE);
    return OK;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) {
    BEGIN(i)
    if ((int)link >= (int)value_now(i, NVLINKS_ACTIVE)) return NOT_SUPPORTED;
    *type = devices[i].base[NVSWITCH] ? 2 : 0; /* SWITCH, GPU */
    return OK;
}

typedef struct {
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
} FabricInfo;
int nvmlDeviceGetGpuFabricInfo(void *handle, FabricInfo *out) {
    BEGIN(i)
    if (!devices[i].base[NVSWITCH]) return NOT_SUPPORTED;
    *out = (FabricInfo){.clique = (unsigned)devices[i].base[CLIQUE], .state = 3}; /* COMPLETED */
    out->cluster[15] = (unsigned char)devices[i].base[CLUSTER];
    return OK;
}

static int slice_of(int parent, unsigned number) {
    for (int i = 0; i < MAX_DEVICES; i++)
        if (devices[i].exists && devices[i].base[PARENT] == parent && !number--) return i;
    return -1;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    BEGIN(i) NOT_A_SLICE(i)
    *current = *pending = slice_of(i, 0) >= 0;
    return OK;
}

int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *out) {
    BEGIN(i)
    if (!slice(i)) return INVALID_ARGUMENT;
    *out = (unsigned)devices[i].base[GPU_INSTANCE];
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *out) {
    BEGIN(i)
    *out = 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned number, void **out) {
    BEGIN(i)
    int device = slice_of(i, number);
    if (device < 0) return NOT_FOUND;
    *out = (void *)(intptr_t)(device + 1);
    return OK;
}
