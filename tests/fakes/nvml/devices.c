/* Sessions, handles, identity and MIG. */
#include "nvml_stub.h"

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    refresh();
    nvmlReturn_t bad = failure(__func__, ANY);
    if (!bad) init_count++;
    return bad;
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    if (!init_count) return NVML_ERROR_UNINITIALIZED;
    init_count--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code) { return nvml_error_text(code); }

static nvmlReturn_t copy_text(char *out, unsigned size, const char *text) {
    NEED(out)
    if (strlen(text) >= size) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
    nvmlReturn_t bad = begin(__func__, ANY);
    return bad ? bad : copy_text(out, size, driver);
}

/* Counts the devices that this user may not open, too. */
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(count)
    *count = 0;
    for (int i = 0; i < MAX_DEVICES; i++) *count += devices[i].exists && !slice(i);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *handle) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(handle)
    for (int i = 0; i < MAX_DEVICES; i++)
        if (devices[i].exists && !slice(i) && devices[i].index == (int)index) {
            *handle = handle_of(i);
            return failure(__func__, i);
        }
    return NVML_ERROR_INVALID_ARGUMENT;
}

/* The search initializes each GPU on its way, and ends at the first one that is lost, whichever GPU is sought. */
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(uuid)
    NEED(handle)
    for (int i = 0; i < MAX_DEVICES; i++) {
        if (!devices[i].exists) continue;
        bad = failure(__func__, slice(i) ? (int)devices[i].base[PARENT] : i);
        if (bad == NVML_ERROR_GPU_IS_LOST) return bad;
        if (strcmp(devices[i].uuid, uuid)) continue;
        *handle = handle_of(i);
        return bad ? bad : failure(__func__, i);
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *out, unsigned size) {
    BEGIN(i)
    return copy_text(out, size, devices[i].uuid);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *out, unsigned size) {
    BEGIN(i)
    return copy_text(out, size, devices[i].name);
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t handle, char *out, unsigned size) {
    BEGIN(i) NOT_A_SLICE(i)
    return copy_text(out, size, devices[i].vbios);
}

NUMBER(nvmlDeviceGetPersistenceMode, unsigned, devices[i].base[PERSISTENCE])
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, devices[i].base[PCIE_GENERATION])
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, devices[i].base[PCIE_WIDTH])
NUMBER(nvmlDeviceGetMinorNumber, unsigned, devices[i].base[MINOR])

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *out) {
    BEGIN(i) NEED(out)
    unsigned domain = (unsigned)devices[i].base[DOMAIN];
    *out = (nvmlPciInfo_t){.domain = domain, .bus = (unsigned)devices[i].bus};
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:00.0", domain & 0xffff, devices[i].bus);
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:00.0", domain, devices[i].bus);
    return NVML_SUCCESS;
}

int slice_of(int parent, unsigned number) {
    for (int i = 0; i < MAX_DEVICES; i++)
        if (devices[i].exists && devices[i].base[PARENT] == parent && !number--) return i;
    return -1;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned *current, unsigned *pending) {
    BEGIN(i) NEED(current) NEED(pending) NOT_A_SLICE(i)
    if (!devices[i].base[MIG_SLICES]) return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = slice_of(i, 0) >= 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned *out) {
    BEGIN(i) NEED(out)
    *out = (unsigned)devices[i].base[MIG_SLICES];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned number, nvmlDevice_t *out) {
    BEGIN(i) NEED(out)
    int device = slice_of(i, number);
    if (device < 0) return NVML_ERROR_NOT_FOUND;
    *out = handle_of(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned *out) {
    BEGIN(i) NEED(out)
    if (!slice(i)) return NVML_ERROR_INVALID_ARGUMENT;
    *out = (unsigned)devices[i].base[GPU_INSTANCE];
    return NVML_SUCCESS;
}
