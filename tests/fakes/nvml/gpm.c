/* GPM. A sample holds the integrals of the activities; the metrics are their means between two samples. */
#include "nvml_stub.h"

typedef struct { int device; double t, sum[4]; } Sample;
static const struct { unsigned id; int key; const char *name; } metrics[4] = {
    {NVML_GPM_METRIC_GRAPHICS_UTIL, UTILIZATION, "Graphics Util"},
    {NVML_GPM_METRIC_SM_UTIL, SM_ACTIVITY, "SM Activity"},
    {NVML_GPM_METRIC_ANY_TENSOR_UTIL, TENSOR_ACTIVITY, "Any Tensor Activity"},
    {NVML_GPM_METRIC_DRAM_BW_UTIL, DRAM_ACTIVITY, "DRAM Activity"}};
static int live_samples;

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t handle, nvmlGpmSupport_t *out) {
    BEGIN(i) NEED(out)
    if (out->version != NVML_GPM_SUPPORT_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    out->isSupportedDevice = devices[i].base[GPM] > 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleAlloc(Sample **out) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(out)
    *out = calloc(1, sizeof **out);
    live_samples++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleFree(Sample *sample) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(sample)
    free(sample);
    live_samples--;
    return NVML_SUCCESS;
}
int nvml_stub_live_samples(void) { return live_samples; } /* for tests; NVML has no such call */

static nvmlReturn_t take(int i, Sample *out) {
    if (!(devices[i].base[GPM] > 0)) return NVML_ERROR_NOT_SUPPORTED;
    out->device = i;
    out->t = seconds();
    for (int n = 0; n < 4; n++) out->sum[n] = integral(i, metrics[n].key);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t handle, Sample *out) {
    BEGIN(i) NEED(out) NOT_A_SLICE(i)
    return take(i, out);
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t handle, unsigned instance, Sample *out) {
    BEGIN(i) NEED(out) NOT_A_SLICE(i)
    for (int n = 0; n < MAX_DEVICES; n++)
        if (devices[n].exists && devices[n].base[PARENT] == i && devices[n].base[GPU_INSTANCE] == instance)
            return take(n, out);
    return NVML_ERROR_NOT_FOUND;
}

/* Samples closer than the counters' refresh give no mean. */
static nvmlReturn_t mean(const Sample *a, const Sample *b, nvmlGpmMetric_t *out) {
    if (a->device != b->device) return NVML_ERROR_INVALID_ARGUMENT;
    if (b->t - a->t < 0.095) return NVML_ERROR_UNKNOWN;
    for (int k = 0; k < 4; k++)
        if (metrics[k].id == out->metricId) {
            out->value = (b->sum[k] - a->sum[k]) / (b->t - a->t);
            out->metricInfo = (metricInfo_t){(char *)metrics[k].name, (char *)metrics[k].name, "%"};
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *out) {
    nvmlReturn_t bad = begin(__func__, ANY);
    if (bad) return bad;
    NEED(out)
    if (out->version != NVML_GPM_METRICS_GET_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    NEED(out->sample1)
    NEED(out->sample2)
    if (out->numMetrics == 0 || out->numMetrics > NVML_GPM_METRIC_MAX) return NVML_ERROR_INVALID_ARGUMENT;
    const Sample *a = out->sample1, *b = out->sample2;
    bad = failure(__func__, a->device);
    if (bad) return bad;
    for (unsigned n = 0; n < out->numMetrics; n++)
        out->metrics[n].nvmlReturn = mean(a, b, &out->metrics[n]);
    return NVML_SUCCESS;
}
