/* A stand-in for libnvidia-ml.so.1, driven by a text file; tests load it through the real nvidia-ml-py.
 *
 * NVML_STUB_FILE     the driving file, read again whenever it changes; %h in it stands for the host name
 * NVML_STUB_DEVICES  how many devices to make up where that file is missing (default 0); their UUIDs derive from the
 *                    host name and their figures vary with time
 *
 * Lines of the file, '#' begins a comment:
 *   driver VERSION
 *   device I KEY VALUE     I: any number below 64; a device exists once a line names it. KEY: uuid minor name
 *                          memory_total memory_used memory_reserved (bytes) utilization (%) power (mW) energy (mJ)
 *                          temperature sm_clock memory_clock parent (the number of the GPU that it is a MIG slice of)
 *                          bus (of PCI, in hex) nvlinks nvlinks_active nvswitch (1) cluster clique (a number each)
 *   fail I FUNCTION CODE   FUNCTION as NVML exports it, or *; I: a number, or * for every device and for the calls
 *                          that concern none
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

#define MOST 64
#define ANY -1

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, MISMATCH = 25 };

typedef unsigned long long u64;
typedef struct {
    int exists, minor, parent, index, bus, nvlinks, nvlinks_active, nvswitch, cluster, clique;
    char uuid[96], name[96];
    double memory_total, memory_used, memory_reserved, utilization, power, energy, temperature, sm_clock, memory_clock;
} Device;
typedef struct {
    int device, code;
    char function[64];
} Failure;

static Device devices[MOST];
static Failure failures[256];
static int failure_count, init_count, synthetic;
static char driver[80];
static struct stat seen;
static char host[256];

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void plain_device(int i) {
    Device *d = &devices[i];
    uint64_t hash = 1469598103934665603ULL;
    for (const char *c = host; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ULL;
    *d = (Device){.exists = 1, .minor = i, .parent = -1, .memory_total = 80.0 * (1 << 30), .memory_used = 1 << 30,
                  .memory_reserved = 500.0 * (1 << 20), .power = 70000, .energy = -1, .temperature = 30,
                  .sm_clock = 345, .memory_clock = 2619};
    snprintf(d->uuid, sizeof d->uuid, "GPU-%08x-%04x-%04x-%04x-%012x", (unsigned)(hash >> 32),
             (unsigned)(hash >> 16 & 0xffff), (unsigned)(hash & 0xffff), 0x8000, i);
    snprintf(d->name, sizeof d->name, "NVIDIA H100 80GB HBM3 (stub)");
}

static void set_value(int i, const char *key, const char *value) {
    if (i < 0 || i >= MOST) return;
    Device *d = &devices[i];
    if (!d->exists) plain_device(i);
    double number = atof(value);
    if (!strcmp(key, "uuid")) snprintf(d->uuid, sizeof d->uuid, "%s", value);
    else if (!strcmp(key, "name")) snprintf(d->name, sizeof d->name, "%s", value);
    else if (!strcmp(key, "minor")) d->minor = (int)number;
    else if (!strcmp(key, "parent")) d->parent = (int)number;
    else if (!strcmp(key, "bus")) d->bus = (int)strtol(value, NULL, 16);
    else if (!strcmp(key, "nvlinks")) d->nvlinks = d->nvlinks_active = (int)number;
    else if (!strcmp(key, "nvlinks_active")) d->nvlinks_active = (int)number;
    else if (!strcmp(key, "nvswitch")) d->nvswitch = (int)number;
    else if (!strcmp(key, "cluster")) d->cluster = (int)number;
    else if (!strcmp(key, "clique")) d->clique = (int)number;
    else if (!strcmp(key, "memory_total")) d->memory_total = number;
    else if (!strcmp(key, "memory_used")) d->memory_used = number;
    else if (!strcmp(key, "memory_reserved")) d->memory_reserved = number;
    else if (!strcmp(key, "utilization")) d->utilization = number;
    else if (!strcmp(key, "power")) d->power = number;
    else if (!strcmp(key, "energy")) d->energy = number;
    else if (!strcmp(key, "temperature")) d->temperature = number;
    else if (!strcmp(key, "sm_clock")) d->sm_clock = number;
    else if (!strcmp(key, "memory_clock")) d->memory_clock = number;
    else fprintf(stderr, "nvml_stub: unknown key %s\n", key);
}

static void parse(FILE *f) {
    char line[512], a[64], b[64];
    int value_at;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "#\n")] = 0;
        if (sscanf(line, " driver %79s", driver) == 1) continue;
        if (sscanf(line, " device %63s %63s %n", a, b, &value_at) == 2) {
            set_value(atoi(a), b, line + value_at);
            continue;
        }
        Failure *x = &failures[failure_count];
        if (failure_count < 256 && sscanf(line, " fail %63s %63s %d", a, x->function, &x->code) == 3) {
            x->device = strcmp(a, "*") ? atoi(a) : ANY;
            failure_count++;
        }
    }
}

static void synthesise(void) {
    double t = seconds();
    for (int i = 0; i < MOST; i++) {
        Device *d = &devices[i];
        if (!d->exists) continue;
        d->utilization = floor(75 + 20 * sin(t / 7 + i));
        d->memory_used = (40.0 + i) * (1 << 30);
        d->power = 100000 + 5000 * d->utilization;
        d->energy = t * 475000; /* the mean of that power since 1970 */
        d->temperature = 40 + floor(d->utilization / 4);
        d->sm_clock = 1980;
    }
}

static void number_devices(void) {
    int next = 0;
    for (int i = 0; i < MOST; i++)
        if (devices[i].exists && devices[i].parent < 0) devices[i].index = next++;
}

static void refresh(void) {
    const char *name = getenv("NVML_STUB_FILE");
    char path[4096] = "";
    if (!host[0]) gethostname(host, sizeof host - 1);
    for (size_t n = 0; name && *name && n + sizeof host < sizeof path; name++) {
        if (name[0] == '%' && name[1] == 'h') {
            n += (size_t)snprintf(path + n, sizeof path - n, "%s", host);
            name++;
        } else {
            path[n++] = *name;
            path[n] = 0;
        }
    }
    struct stat now;
    FILE *f = path[0] && !stat(path, &now) ? fopen(path, "r") : NULL;
    if (!f) {
        if (!synthetic) {
            const char *count = getenv("NVML_STUB_DEVICES");
            memset(devices, 0, sizeof devices);
            memset(&seen, 0, sizeof seen);
            failure_count = 0;
            strcpy(driver, "570.00.stub");
            for (int i = 0; i < MOST && count && i < atoi(count); i++) plain_device(i);
            number_devices();
        }
        synthetic = 1;
        synthesise();
        return;
    }
    if (synthetic || now.st_ino != seen.st_ino || now.st_size != seen.st_size ||
        memcmp(&now.st_mtim, &seen.st_mtim, sizeof now.st_mtim)) {
        memset(devices, 0, sizeof devices);
        failure_count = synthetic = 0;
        strcpy(driver, "570.00.stub");
        parse(f);
        number_devices();
        seen = now;
    }
    fclose(f);
}

static int failure(const char *function, int device) {
    for (int i = 0; i < failure_count; i++) {
        Failure *x = &failures[i];
        if ((x->device == ANY || x->device == device) && (!strcmp(x->function, "*") || !strcmp(x->function, function)))
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

/* A handle is the device's number plus one, so that none is NULL. */
static int number_of(void *handle) { return (int)(intptr_t)handle - 1; }

#define BEGIN(i)                                                             \
    int i = number_of(handle);                                               \
    int bad = begin(__func__, i);                                            \
    if (bad) return bad;                                                     \
    if (i < 0 || i >= MOST || !devices[i].exists) return INVALID_ARGUMENT;
#define NOT_A_SLICE(i) if (devices[i].parent >= 0) return NOT_SUPPORTED;

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
    for (int i = 0; i < MOST; i++) *count += devices[i].exists && devices[i].parent < 0;
    return bad;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    refresh();
    for (int i = 0; i < MOST; i++)
        if (devices[i].exists && devices[i].parent < 0 && devices[i].index == (int)index) {
            *handle = (void *)(intptr_t)(i + 1);
            return begin(__func__, i);
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    refresh();
    for (int i = 0; i < MOST; i++)
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
    *out = (unsigned)devices[i].minor;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, u64 out[3]) { /* total, free, used */
    BEGIN(i)
    out[0] = (u64)devices[i].memory_total;
    out[2] = (u64)(devices[i].memory_used + devices[i].memory_reserved);
    out[1] = out[0] - out[2];
    return OK;
}

typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *out) {
    BEGIN(i)
    if (out->version != (sizeof(MemoryV2) | 2u << 24)) return MISMATCH;
    out->total = (u64)devices[i].memory_total;
    out->reserved = (u64)devices[i].memory_reserved;
    out->used = (u64)devices[i].memory_used;
    out->free = out->total - out->used - out->reserved;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned out[2]) { /* gpu, memory */
    BEGIN(i) NOT_A_SLICE(i)
    out[0] = (unsigned)devices[i].utilization;
    out[1] = out[0] / 2;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = (unsigned)devices[i].power;
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, u64 *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = devices[i].energy < 0 ? (u64)(seconds() * devices[i].power) : (u64)devices[i].energy;
    return OK;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
    (void)sensor;
    BEGIN(i) NOT_A_SLICE(i)
    *out = (unsigned)devices[i].temperature;
    return OK;
}

typedef struct { unsigned version; int sensor, temperature; } TemperatureV1;
int nvmlDeviceGetTemperatureV(void *handle, TemperatureV1 *out) {
    BEGIN(i) NOT_A_SLICE(i)
    if (out->version != (sizeof(TemperatureV1) | 1u << 24)) return MISMATCH;
    out->temperature = (int)devices[i].temperature;
    return OK;
}

int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *out) {
    BEGIN(i) NOT_A_SLICE(i)
    *out = (unsigned)(kind == 2 ? devices[i].memory_clock : devices[i].sm_clock);
    return OK;
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
    if (!devices[i].nvlinks) return NOT_SUPPORTED;
    if ((int)link >= devices[i].nvlinks) return INVALID_ARGUMENT;
    *active = (int)link < devices[i].nvlinks_active;
    return OK;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) {
    BEGIN(i)
    if ((int)link >= devices[i].nvlinks_active) return NOT_SUPPORTED;
    *type = devices[i].nvswitch ? 2 : 0; /* SWITCH, GPU */
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
    if (!devices[i].nvswitch) return NOT_SUPPORTED;
    *out = (FabricInfo){.clique = (unsigned)devices[i].clique, .state = 3}; /* COMPLETED */
    out->cluster[15] = (unsigned char)devices[i].cluster;
    return OK;
}

static int slice_of(int parent, unsigned number) {
    for (int i = 0; i < MOST; i++)
        if (devices[i].exists && devices[i].parent == parent && !number--) return i;
    return -1;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    BEGIN(i) NOT_A_SLICE(i)
    *current = *pending = slice_of(i, 0) >= 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *out) {
    BEGIN(i)
    *out = 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned number, void **out) {
    BEGIN(i)
    int found = slice_of(i, number);
    if (found < 0) return NOT_FOUND;
    *out = (void *)(intptr_t)(found + 1);
    return OK;
}
