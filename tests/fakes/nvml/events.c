/* Event sets. */
#define _GNU_SOURCE
#include <unistd.h>

#include "nvml_stub.h"

#define SETS 16
typedef struct { int used; u64 mask[MAX_DEVICES]; double created; unsigned char reported[MAX_EVENTS]; } EventSet;
static EventSet sets[SETS];

void forget_reports(void) {
    for (int s = 0; s < SETS; s++) memset(sets[s].reported, 0, sizeof sets[s].reported);
}

nvmlReturn_t nvmlEventSetCreate(EventSet **out) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(out)
    for (int s = 0; s < SETS; s++)
        if (!sets[s].used) {
            sets[s] = (EventSet){.used = 1, .created = seconds()};
            *out = &sets[s];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_UNKNOWN;
}

nvmlReturn_t nvmlEventSetFree(EventSet *set) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(set)
    set->used = 0;
    return NVML_SUCCESS;
}

NUMBER(nvmlDeviceGetSupportedEventTypes, u64, devices[i].base[EVENTS])

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t handle, u64 types, EventSet *set) {
    BEGIN(i) NEED(set) NOT_A_SLICE(i)
    if (types & ~(u64)devices[i].base[EVENTS]) return NVML_ERROR_NOT_SUPPORTED;
    set->mask[i] |= types;
    return NVML_SUCCESS;
}

/* The next event that the set has not had; NVML_ERROR_TIMEOUT if there is none, and a lost GPU's error for any set. */
static nvmlReturn_t next_event(EventSet *set, nvmlEventData_t *out) {
    nvmlReturn_t bad = begin("nvmlEventSetWait_v2", ANY);
    if (bad) return bad;
    for (int i = 0; i < MAX_DEVICES; i++)
        if (set->mask[i] && (bad = failure("nvmlEventSetWait_v2", i))) return bad;
    for (int n = 0; n < event_count; n++) {
        Event *e = &events[n];
        double at = origin + e->t;
        if (set->reported[n] || at > seconds() || at < set->created) continue;
        int board = slice(e->device) ? (int)devices[e->device].base[PARENT] : e->device;
        if (!(set->mask[board] & e->type)) continue;
        set->reported[n] = 1;
        *out = (nvmlEventData_t){
            .device = handle_of(board),
            .eventType = e->type,
            .eventData = e->data,
            .gpuInstanceId = slice(e->device) ? (unsigned)devices[e->device].base[GPU_INSTANCE] : UINT32_MAX,
            .computeInstanceId = UINT32_MAX};
        return NVML_SUCCESS;
    }
    return NVML_ERROR_TIMEOUT;
}

nvmlReturn_t nvmlEventSetWait_v2(EventSet *set, nvmlEventData_t *out, unsigned timeout_ms) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(set)
    NEED(out)
    for (double until = seconds() + timeout_ms / 1e3;; usleep(1000)) {
        nvmlReturn_t result = next_event(set, out);
        if (result != NVML_ERROR_TIMEOUT || seconds() >= until) return result;
    }
}
