/* The driving file and the load that it describes; its format is in nvml_stub.h. */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "nvml_stub.h"

static const char *const names[KEYS] = {
    "minor", "parent", "gpu_instance", "mig_slices", "domain", "nvswitch", "nvlink_version", "cluster", "clique", "ecc",
    "retires_pages", "power_averaged", "power_limit", "default_power_limit", "max_sm_clock", "max_memory_clock",
    "persistence", "pcie_generation", "pcie_width", "gpm", "events", "narrow", "memory_total", "memory_used",
    "memory_reserved", "utilization", "memory_busy", "power", "module_power", "temperature", "memory_temperature",
    "sm_clock", "memory_clock", "reasons", "sm_activity", "tensor_activity", "dram_activity", "processes",
    "ecc_corrected", "ecc_uncorrected", "ecc_corrected_aggregate", "ecc_uncorrected_aggregate", "remapped",
    "remapped_corrected", "remap_pending", "remap_failed", "retired_sbe", "retired_dbe", "retired_pending", "nvlinks",
    "nvlinks_active", "nvlink_errors", "pcie_replays", "energy", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx",
    "pcie_tx_rate", "pcie_rx_rate", "nvlink_tx_rate", "nvlink_rx_rate",
};
static const int rate_of[COUNTERS] = {POWER, PCIE_TX_RATE, PCIE_RX_RATE, NVLINK_TX_RATE, NVLINK_RX_RATE};
#define UNSET NAN

typedef struct { int device, code; char function[64]; double from, until; } Failure;

Device devices[MAX_DEVICES];
Event events[MAX_EVENTS];
int event_count, init_count;
double origin;
char driver[80];
static Failure failures[256];
static int failure_count, synthetic;
static double period;
static struct stat last_stat;
static char host[256];

double seconds(void) {
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
double integral(int i, int key) {
    double t = seconds();
    if (synthetic) return 0.8 * (75 * t - 140 * cos(t / 7 + i));
    t = fmax(0, t - origin);
    double rounds = period > 0 ? floor(t / period) : 0;
    return rounds * integral_once(i, key, period) + integral_once(i, key, t - rounds * period);
}

double value_now(int i, int key) { return value_at(i, key, now_in_load()); }

double mean_of_last_second(int i, int key) {
    double t = now_in_load(), from = fmax(0, t - 1);
    if (synthetic || t <= 0) return value_now(i, key);
    return (integral_once(i, key, t) - integral_once(i, key, from)) / (t - from);
}

double counter(int i, int key) {
    double set = value_now(i, key);
    return isnan(set) ? devices[i].carried[key - ENERGY] + integral(i, rate_of[key - ENERGY]) : set;
}

static void plain_device(int i) {
    Device *d = &devices[i];
    uint64_t hash = 1469598103934665603ULL;
    for (const char *c = host; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ULL;
    d->exists = 1;
    double *b = d->base;
    b[MINOR] = i;
    b[PARENT] = -1;
    b[MIG_SLICES] = 7;
    b[NVLINK_VERSION] = 4;
    b[ECC] = b[POWER_AVERAGED] = 1;
    b[POWER_LIMIT] = b[DEFAULT_POWER_LIMIT] = 700000;
    b[MAX_SM_CLOCK] = 1980;
    b[MAX_MEMORY_CLOCK] = 2619;
    b[PERSISTENCE] = 1;
    b[PCIE_GENERATION] = 5;
    b[PCIE_WIDTH] = 16;
    b[EVENTS] = nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeXidCriticalError;
    b[MEMORY_TOTAL] = 80.0 * (1 << 30);
    b[MEMORY_USED] = 1 << 30;
    b[MEMORY_RESERVED] = 500.0 * (1 << 20);
    b[MEMORY_BUSY] = b[MODULE_POWER] = UNSET;
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
    else if (!strcmp(key, "vbios")) snprintf(d->vbios, sizeof d->vbios, "%s", value);
    else if (!strcmp(key, "bus")) d->bus = (int)strtol(value, NULL, 16);
    else if (!strcmp(key, "domain")) d->base[DOMAIN] = (double)strtol(value, NULL, 16);
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
        int fields = event_count < MAX_EVENTS ? sscanf(line, " event %63s %lf %63s %llu", a, &e->t, b, &e->data) : 0;
        if (fields >= 3) {
            e->device = atoi(a);
            e->type = !strcmp(b, "xid")   ? nvmlEventTypeXidCriticalError
                      : !strcmp(b, "dbe") ? nvmlEventTypeDoubleBitEccError
                                          : nvmlEventTypeSingleBitEccError;
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
    forget_reports();
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

void refresh(void) {
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

nvmlReturn_t failure(const char *function, int device) {
    double t = failure_count ? now_in_load() : 0;
    for (int i = 0; i < failure_count; i++) {
        Failure *x = &failures[i];
        if ((x->device == ANY || x->device == device) && t >= x->from && t < x->until &&
            (!strcmp(x->function, "*") || !strcmp(x->function, function)))
            return x->code;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t begin(const char *function, int device) {
    refresh();
    return init_count ? failure(function, device) : NVML_ERROR_UNINITIALIZED;
}
