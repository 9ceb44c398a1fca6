/* A stub of libnvidia-ml.so.1, driven by a text file; tests load it through the real nvidia-ml-py.
 *
 * Structures, versions and constants come from nvidia-ml-py: header.py writes them to nvml_py.h. Functions answer as
 * nvml.h documents them: NVML_ERROR_UNINITIALIZED before nvmlInit, NVML_ERROR_INVALID_ARGUMENT for a null pointer or
 * an unknown handle, NVML_ERROR_ARGUMENT_VERSION_MISMATCH for a structure of another version.
 *
 * NVML_STUB_FILE     the driving file, read again whenever it changes; %h in it stands for the host name
 * NVML_STUB_DEVICES  how many devices to simulate if that file is missing (default 0); their UUIDs derive from the
 *                    host name, and their values vary with time
 *
 * Lines of the file; '#' starts a comment:
 *   driver VERSION         field values that were added to NVML in a later version are unknown
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
 * Text KEYs: uuid name vbios. Constants (device): minor, parent (for a MIG slice, the number of its GPU), gpu_instance
 * (of the slice), mig_slices (most slices; 0: no MIG), bus domain (of PCI, in hex), nvswitch (1), nvlink_version (2
 * Volta to 5 Blackwell: decides which fields exist), cluster, clique, ecc (0: off), retires_pages (1: before Ampere,
 * which remaps rows), power_averaged (0: Volta and GA100, whose power is a momentary value; otherwise a mean of 1 s),
 * power_limit default_power_limit (mW), max_sm_clock max_memory_clock (MHz), persistence (1), pcie_generation
 * pcie_width, gpm (1: also set by any *_activity), events (mask of supported types; 11), narrow (1: PCIe counters of 32
 * bits).
 * Values, which at and ramp may change: memory_total memory_used memory_reserved (bytes), utilization memory_busy (%),
 * power module_power (mW), temperature memory_temperature (°C), sm_clock memory_clock (MHz), reasons (mask of throttle
 * reasons), sm_activity tensor_activity dram_activity (%), processes, ecc_corrected ecc_uncorrected (since the driver
 * was loaded), ecc_corrected_aggregate ecc_uncorrected_aggregate (in the board's life), remapped remapped_corrected
 * (rows, after uncorrectable and correctable errors), remap_pending remap_failed, retired_sbe retired_dbe
 * retired_pending (pages), nvlinks nvlinks_active nvlink_errors, pcie_replays.
 * Counters: energy (mJ), pcie_tx pcie_rx nvlink_tx nvlink_rx (bytes). If not set, a counter is the integral of its
 * rate: power, pcie_tx_rate pcie_rx_rate nvlink_tx_rate nvlink_rx_rate (bytes/s), and continues after the file is
 * replaced.
 */
#ifndef NVML_STUB_H
#define NVML_STUB_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *nvmlDevice_t;
typedef int nvmlReturn_t;
typedef unsigned long long u64;

#include "nvml_py.h"

#define MAX_DEVICES 64
#define MAX_EVENTS 1024
#define ANY -1

enum {
    MINOR, PARENT, GPU_INSTANCE, MIG_SLICES, DOMAIN, NVSWITCH, NVLINK_VERSION, CLUSTER, CLIQUE, ECC, RETIRES_PAGES,
    POWER_AVERAGED, POWER_LIMIT, DEFAULT_POWER_LIMIT, MAX_SM_CLOCK, MAX_MEMORY_CLOCK, PERSISTENCE, PCIE_GENERATION,
    PCIE_WIDTH, GPM, EVENTS, NARROW, MEMORY_TOTAL, MEMORY_USED, MEMORY_RESERVED, UTILIZATION, MEMORY_BUSY, POWER,
    MODULE_POWER, TEMPERATURE, MEMORY_TEMPERATURE, SM_CLOCK, MEMORY_CLOCK, REASONS, SM_ACTIVITY, TENSOR_ACTIVITY,
    DRAM_ACTIVITY, PROCESSES, ECC_CORRECTED, ECC_UNCORRECTED, ECC_CORRECTED_AGGREGATE, ECC_UNCORRECTED_AGGREGATE,
    REMAPPED, REMAPPED_CORRECTED, REMAP_PENDING, REMAP_FAILED, RETIRED_SBE, RETIRED_DBE, RETIRED_PENDING, NVLINKS,
    NVLINKS_ACTIVE, NVLINK_ERRORS, PCIE_REPLAYS, ENERGY, PCIE_TX, PCIE_RX, NVLINK_TX, NVLINK_RX, PCIE_TX_RATE,
    PCIE_RX_RATE, NVLINK_TX_RATE, NVLINK_RX_RATE, KEYS
};
#define COUNTERS 5 /* from ENERGY on; each is the integral of its rate if it is not set */

typedef struct { double t, value; int ramp; } Point;
typedef struct { int count; Point *points; } Track; /* a value over time; without points: its base */
typedef struct {
    int exists, index, bus;
    char uuid[96], name[96], vbios[32];
    double base[KEYS], carried[COUNTERS];
    Track track[KEYS];
} Device;
typedef struct { int device; double t; u64 type, data; } Event;

extern Device devices[MAX_DEVICES];
extern Event events[MAX_EVENTS];
extern int event_count, init_count;
extern double origin; /* the time at which T is 0, in seconds since 1970 */
extern char driver[80];

double seconds(void);
double value_now(int i, int key);
double counter(int i, int key);
double integral(int i, int key);
double mean_of_last_second(int i, int key);
void refresh(void);          /* read the driving file if it changed */
void forget_reports(void);   /* events.c: the events of a new driving file are new to every event set */

/* The code that the driving file gives to a call, or NVML_SUCCESS. */
nvmlReturn_t failure(const char *function, int device);
/* As failure, or NVML_ERROR_UNINITIALIZED. */
nvmlReturn_t begin(const char *function, int device);

/* A handle is the device's number plus one, so that no handle is NULL. */
static inline nvmlDevice_t handle_of(int i) { return (nvmlDevice_t)(intptr_t)(i + 1); }
static inline int slice(int i) { return devices[i].base[PARENT] >= 0; }
int slice_of(int parent, unsigned number); /* the device number of a GPU's slice; -1 if there is none */

/* Blank values of a broken driver are far above the range of the type. */
static inline unsigned narrow(double value) {
    return value < 0 ? 0 : value > 4294967295.0 ? 4294967295u : (unsigned)(value + 0.5);
}

#define BEGIN(i)                                                                     \
    int i = (int)(intptr_t)handle - 1;                                               \
    nvmlReturn_t bad = begin(__func__, i);                                           \
    if (bad) return bad;                                                             \
    if (i < 0 || i >= MAX_DEVICES || !devices[i].exists) return NVML_ERROR_INVALID_ARGUMENT;
#define NEED(pointer) if (!(pointer)) return NVML_ERROR_INVALID_ARGUMENT;
#define NOT_A_SLICE(i) if (slice(i)) return NVML_ERROR_NOT_SUPPORTED;
/* A function that returns one number of a GPU; slices have none. */
#define NUMBER(function, type, value)                      \
    nvmlReturn_t function(nvmlDevice_t handle, type *out) { \
        BEGIN(i) NEED(out) NOT_A_SLICE(i)                  \
        *out = (type)(value);                              \
        return NVML_SUCCESS;                               \
    }
#define NOT_IN_MIG_MODE(i) if (slice_of(i, 0) >= 0) return NVML_ERROR_NOT_SUPPORTED;

#endif
