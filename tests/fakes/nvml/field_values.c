/* nvmlDeviceGetFieldValues. */
#define _GNU_SOURCE
#include "nvml_stub.h"

#define ALL_LINKS UINT32_MAX

/* The driver in which a field and those after it were added, by NVML's change log. */
static int is_known(unsigned field) {
    static const struct { unsigned from; int driver; } added[] = {
        {NVML_FI_DEV_RESET_STATUS, 560}, {NVML_FI_DEV_NVLINK_COUNT_XMIT_PACKETS, 560},
        {NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 555}, {NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS, 535},
        {NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, 525}};
    for (unsigned n = 0; n < sizeof added / sizeof *added; n++)
        if (field >= added[n].from) return atoi(driver) >= added[n].driver;
    return 1;
}

static nvmlReturn_t u64_value(nvmlFieldValue_t *out, double value) {
    out->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    out->value.ullVal = (u64)value;
    return NVML_SUCCESS;
}

static nvmlReturn_t u32_value(nvmlFieldValue_t *out, double value) {
    out->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    out->value.uiVal = narrow(value);
    return NVML_SUCCESS;
}

/* The value of one link, or of all; links share it evenly, errors are on the first one. */
static nvmlReturn_t link_value(int i, nvmlFieldValue_t *out, int has_total, double value, int is_error) {
    double links = value_now(i, NVLINKS);
    if (links <= 0) return NVML_ERROR_NOT_SUPPORTED;
    if (out->scopeId == ALL_LINKS) return has_total ? u64_value(out, value) : NVML_ERROR_INVALID_ARGUMENT;
    if (out->scopeId >= links) return NVML_ERROR_INVALID_ARGUMENT;
    return u64_value(out, is_error ? (out->scopeId == 0 ? value : 0) : value / links);
}

static nvmlReturn_t pcie_bytes(int i, nvmlFieldValue_t *out, int key) {
    u64_value(out, counter(i, key));
    if (devices[i].base[NARROW] > 0) {
        out->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        out->value.ullVal &= UINT32_MAX;
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t power(int i, nvmlFieldValue_t *out, int averaged) {
    int key = out->scopeId == NVML_POWER_SCOPE_GPU      ? POWER
              : out->scopeId == NVML_POWER_SCOPE_MODULE ? MODULE_POWER
                                                        : -1;
    if (key < 0 || isnan(value_now(i, key))) return NVML_ERROR_NOT_SUPPORTED;
    if (averaged && !(devices[i].base[POWER_AVERAGED] > 0)) return NVML_ERROR_NOT_SUPPORTED;
    return u32_value(out, averaged ? mean_of_last_second(i, key) : value_now(i, key));
}

/* Error counters: per GPU before Hopper, per link on Hopper, and from Blackwell on per link or in total. */
static nvmlReturn_t link_errors(int i, nvmlFieldValue_t *out, int version, int is_replay) {
    double links = value_now(i, NVLINKS), value = is_replay ? value_now(i, NVLINK_ERRORS) : 0;
    if (links <= 0 || (version <= 3) != (devices[i].base[NVLINK_VERSION] <= 3)) return NVML_ERROR_NOT_SUPPORTED;
    if (version <= 3) return u64_value(out, value);
    if (version != (int)devices[i].base[NVLINK_VERSION]) return NVML_ERROR_NOT_SUPPORTED;
    return link_value(i, out, version >= 5, value, 1);
}

static nvmlReturn_t retired(int i, nvmlFieldValue_t *out, int key) {
    return devices[i].base[RETIRES_PAGES] > 0 ? u64_value(out, value_now(i, key)) : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t field_value(int i, nvmlFieldValue_t *out) {
    char name[32];
    snprintf(name, sizeof name, "field:%u", out->fieldId);
    nvmlReturn_t bad = failure(name, i);
    if (bad) return bad;
    if (!is_known(out->fieldId)) return NVML_ERROR_INVALID_ARGUMENT;
    int fifth = devices[i].base[NVLINK_VERSION] >= 5;
    switch (out->fieldId) {
    case NVML_FI_DEV_RETIRED_SBE: return retired(i, out, RETIRED_SBE);
    case NVML_FI_DEV_RETIRED_DBE: return retired(i, out, RETIRED_DBE);
    case NVML_FI_DEV_RETIRED_PENDING: return retired(i, out, RETIRED_PENDING);
    case NVML_FI_DEV_MEMORY_TEMP: return u32_value(out, value_now(i, MEMORY_TEMPERATURE));
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: return u64_value(out, counter(i, ENERGY));
    case NVML_FI_DEV_PCIE_COUNT_TX_BYTES: return pcie_bytes(i, out, PCIE_TX);
    case NVML_FI_DEV_PCIE_COUNT_RX_BYTES: return pcie_bytes(i, out, PCIE_RX);
    case NVML_FI_DEV_POWER_AVERAGE: return power(i, out, 1);
    case NVML_FI_DEV_POWER_INSTANT: return power(i, out, 0);
    case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: /* KiB */
        return fifth ? NVML_ERROR_NOT_SUPPORTED : link_value(i, out, 1, counter(i, NVLINK_TX) / 1024, 0);
    case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
        return fifth ? NVML_ERROR_NOT_SUPPORTED : link_value(i, out, 1, counter(i, NVLINK_RX) / 1024, 0);
    case NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES:
        return fifth ? link_value(i, out, 1, counter(i, NVLINK_TX), 0) : NVML_ERROR_NOT_SUPPORTED;
    case NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES:
        return fifth ? link_value(i, out, 1, counter(i, NVLINK_RX), 0) : NVML_ERROR_NOT_SUPPORTED;
    case NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: return link_errors(i, out, 3, 0);
    case NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL: return link_errors(i, out, 3, 0);
    case NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: return link_errors(i, out, 3, 1);
    case NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: return link_errors(i, out, 3, 0);
    case NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY: return link_errors(i, out, 4, 1);
    case NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY: return link_errors(i, out, 4, 0);
    case NVML_FI_DEV_NVLINK_ERROR_DL_CRC: return link_errors(i, out, 4, 0);
    case NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS: return link_errors(i, out, 5, 0);
    case NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS: return link_errors(i, out, 5, 1);
    case NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS: return link_errors(i, out, 5, 0);
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t handle, int count, nvmlFieldValue_t *values) {
    BEGIN(i) NEED(values)
    if (count <= 0) return NVML_ERROR_INVALID_ARGUMENT;
    NOT_A_SLICE(i)
    for (int n = 0; n < count; n++) {
        values[n].timestamp = (int64_t)(seconds() * 1e6); /* µs since 1970 */
        values[n].latencyUsec = 1;
        values[n].nvmlReturn = field_value(i, &values[n]);
    }
    return NVML_SUCCESS;
}
