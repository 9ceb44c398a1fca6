/* Memory, utilization, power, clocks, errors and processes. */
#include "nvml_stub.h"

/* "Used" is what is not free: the driver's reserve counts. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *out) {
    BEGIN(i) NEED(out)
    out->total = (u64)value_now(i, MEMORY_TOTAL);
    out->used = (u64)(value_now(i, MEMORY_USED) + value_now(i, MEMORY_RESERVED));
    out->free = out->total - out->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *out) {
    BEGIN(i) NEED(out)
    if (out->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    out->total = (u64)value_now(i, MEMORY_TOTAL);
    out->reserved = (u64)value_now(i, MEMORY_RESERVED);
    out->used = (u64)value_now(i, MEMORY_USED);
    out->free = out->total - out->used - out->reserved;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *out) {
    BEGIN(i) NEED(out) NOT_A_SLICE(i) NOT_IN_MIG_MODE(i)
    double memory = value_now(i, MEMORY_BUSY);
    out->gpu = narrow(value_now(i, UTILIZATION));
    out->memory = isnan(memory) ? out->gpu / 2 : narrow(memory);
    return NVML_SUCCESS;
}

NUMBER(nvmlDeviceGetPowerUsage, unsigned,
       narrow(devices[i].base[POWER_AVERAGED] > 0 ? mean_of_last_second(i, POWER) : value_now(i, POWER)))

NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, narrow(devices[i].base[POWER_LIMIT]))
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, narrow(devices[i].base[DEFAULT_POWER_LIMIT]))

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t handle, unsigned kind, unsigned *out) {
    BEGIN(i) NEED(out)
    if (kind >= NVML_CLOCK_COUNT) return NVML_ERROR_INVALID_ARGUMENT;
    NOT_A_SLICE(i)
    *out = narrow(devices[i].base[kind == NVML_CLOCK_MEM ? MAX_MEMORY_CLOCK : MAX_SM_CLOCK]);
    return NVML_SUCCESS;
}

NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, counter(i, ENERGY))

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t handle, int sensor, unsigned *out) {
    BEGIN(i) NEED(out)
    if (sensor != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    NOT_A_SLICE(i)
    *out = narrow(value_now(i, TEMPERATURE));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t handle, nvmlTemperature_v1_t *out) {
    BEGIN(i) NEED(out)
    if (out->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (out->sensorType != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    NOT_A_SLICE(i)
    out->temperature = (int)fmin(value_now(i, TEMPERATURE) + 0.5, INT32_MAX);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t handle, unsigned kind, unsigned *out) {
    BEGIN(i) NEED(out)
    if (kind >= NVML_CLOCK_COUNT) return NVML_ERROR_INVALID_ARGUMENT;
    NOT_A_SLICE(i)
    *out = narrow(value_now(i, kind == NVML_CLOCK_MEM ? MEMORY_CLOCK : SM_CLOCK));
    return NVML_SUCCESS;
}

NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, value_now(i, REASONS))
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, value_now(i, REASONS))

/* In MIG mode the volatile counts belong to the instances. */
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t handle, unsigned type, unsigned counted, u64 *out) {
    static const int keys[NVML_ECC_COUNTER_TYPE_COUNT][NVML_MEMORY_ERROR_TYPE_COUNT] = {
        {ECC_CORRECTED, ECC_UNCORRECTED}, {ECC_CORRECTED_AGGREGATE, ECC_UNCORRECTED_AGGREGATE}};
    BEGIN(i) NEED(out)
    if (type >= NVML_MEMORY_ERROR_TYPE_COUNT || counted >= NVML_ECC_COUNTER_TYPE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    NOT_A_SLICE(i)
    if (counted == NVML_VOLATILE_ECC) NOT_IN_MIG_MODE(i)
    if (!devices[i].base[ECC]) return NVML_ERROR_NOT_SUPPORTED;
    *out = (u64)value_now(i, keys[counted][type]);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t handle, unsigned *corrected, unsigned *uncorrected,
                                       unsigned *pending, unsigned *failed) {
    BEGIN(i) NEED(corrected) NEED(uncorrected) NEED(pending) NEED(failed) NOT_A_SLICE(i) NOT_IN_MIG_MODE(i)
    if (devices[i].base[RETIRES_PAGES] > 0) return NVML_ERROR_NOT_SUPPORTED;
    *corrected = narrow(value_now(i, REMAPPED_CORRECTED));
    *uncorrected = narrow(value_now(i, REMAPPED));
    *pending = value_now(i, REMAP_PENDING) > 0;
    *failed = value_now(i, REMAP_FAILED) > 0;
    return NVML_SUCCESS;
}

NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, narrow(value_now(i, PCIE_REPLAYS)))

/* Without privileges the driver hides each process's memory. */
static nvmlReturn_t processes(int i, unsigned *count, nvmlProcessInfo_v2_t *out) {
    NEED(count)
    unsigned total = narrow(value_now(i, PROCESSES)), capacity = *count;
    *count = total;
    if (total > capacity) return NVML_ERROR_INSUFFICIENT_SIZE;
    if (total) NEED(out)
    for (unsigned n = 0; n < total; n++)
        out[n] = (nvmlProcessInfo_v2_t){
            .pid = 1000 + n,
            .usedGpuMemory = UINT64_MAX /* NVML_VALUE_NOT_AVAILABLE */,
            .gpuInstanceId = slice(i) ? (unsigned)devices[i].base[GPU_INSTANCE] : UINT32_MAX,
            .computeInstanceId = slice(i) ? 0 : UINT32_MAX};
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v2_t *out) {
    BEGIN(i)
    return processes(i, count, out);
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v2_t *out) {
    BEGIN(i)
    return processes(i, count, out);
}
