/* NVLink and the fabric of NVSwitches. */
#include "nvml_stub.h"

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t handle, unsigned link, unsigned *active) {
    BEGIN(i) NEED(active)
    if (link >= NVML_NVLINK_MAX_LINKS) return NVML_ERROR_INVALID_ARGUMENT;
    if (value_now(i, NVLINKS) <= 0) return NVML_ERROR_NOT_SUPPORTED;
    if ((int)link >= (int)value_now(i, NVLINKS)) return NVML_ERROR_INVALID_ARGUMENT;
    *active = (int)link < (int)value_now(i, NVLINKS_ACTIVE);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t handle, unsigned link, int *type) {
    BEGIN(i) NEED(type)
    if ((int)link >= (int)value_now(i, NVLINKS_ACTIVE)) return NVML_ERROR_NOT_SUPPORTED;
    *type = devices[i].base[NVSWITCH] ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
    return NVML_SUCCESS;
}

/* On a single node the fabric is complete and has no cluster UUID. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t handle, nvmlGpuFabricInfo_t *out) {
    BEGIN(i) NEED(out)
    if (!devices[i].base[NVSWITCH] || devices[i].base[NVLINK_VERSION] < 4) return NVML_ERROR_NOT_SUPPORTED;
    *out = (nvmlGpuFabricInfo_t){
        .cliqueId = (unsigned)devices[i].base[CLIQUE], .state = NVML_GPU_FABRIC_STATE_COMPLETED};
    out->clusterUuid[15] = (unsigned char)devices[i].base[CLUSTER];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t handle, nvmlGpuFabricInfo_v3_t *out) {
    BEGIN(i) NEED(out)
    if (out->version != nvmlGpuFabricInfo_v2 && out->version != nvmlGpuFabricInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (!devices[i].base[NVSWITCH] || devices[i].base[NVLINK_VERSION] < 4) return NVML_ERROR_NOT_SUPPORTED;
    memset(out->clusterUuid, 0, sizeof out->clusterUuid);
    out->clusterUuid[15] = (unsigned char)devices[i].base[CLUSTER];
    out->status = NVML_SUCCESS;
    out->cliqueId = (unsigned)devices[i].base[CLIQUE];
    out->state = NVML_GPU_FABRIC_STATE_COMPLETED;
    out->healthMask = 0;
    if (out->version == nvmlGpuFabricInfo_v3) out->healthSummary = 0;
    return NVML_SUCCESS;
}
