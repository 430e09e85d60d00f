/* A stand-in for the driver's libnvidia-ml.so.1: it answers from the file that NVML_STAND_IN names,
 * read anew at each call, so that a test can break a card while somebody looks at it.
 *
 * Each line of the file is a kind and fields, separated by tabs: `driver`, `gpu`, and below a gpu
 * its `mig` instances. A field is `name=value`. `fail=Function:code,...` makes functions fail,
 * `lost=1` all those of the card; `driver` takes `fail`, too. `hang=Function,...` has functions
 * wait until the file no longer says so.
 *
 * `processes` and `mps_processes` are `pid:bytes` or a bare pid, whose memory is not told;
 * `utilisation` is `pid:percent`, of the moment of the call, or `pid:percent:microseconds`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, LOST = 15 };
enum { LINES = 256, LENGTH = 1024, HANDLES_OF_ONE = 64, HANG_STEP_US = 10000 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } rates_t;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} pci_t;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; unsigned long long stamp; unsigned sm, memory, encoder, decoder; } sample_t;
typedef struct { unsigned counts[6], gpu_slices, compute_slices; unsigned long long memory_mib; } attributes_t;
typedef struct { unsigned id, p2p, slices, instances, rest[6]; unsigned long long memory_mib; } profile_t;

static char lines[LINES][LENGTH];
static int count;

static int load(void)
{
    const char *path = getenv("NVML_STAND_IN");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file)
        return NOT_LOADED;
    for (count = 0; count < LINES && fgets(lines[count], LENGTH, file); count++)
        lines[count][strcspn(lines[count], "\n")] = 0;
    fclose(file);
    return OK;
}

static int is(const char *line, const char *kind)
{
    size_t length = strlen(kind);
    return !strncmp(line, kind, length) && (line[length] == '\t' || !line[length]);
}

static char *field(const char *line, const char *name)
{
    static char found[8][LENGTH];
    static int next;
    size_t length = strlen(name);
    for (const char *at = strchr(line, '\t'); at; at = strchr(at + 1, '\t')) {
        if (!strncmp(at + 1, name, length) && at[1 + length] == '=') {
            char *value = found[next++ % 8];
            const char *start = at + 2 + length;
            size_t size = strcspn(start, "\t");
            memcpy(value, start, size);
            value[size] = 0;
            return value;
        }
    }
    return NULL;
}

static unsigned long long number(const char *line, const char *name, unsigned long long otherwise)
{
    const char *value = field(line, name);
    return value ? strtoull(value, NULL, 0) : otherwise;
}

static int failure(const char *line, const char *function)
{
    const char *all = field(line, "fail");
    if (number(line, "lost", 0))
        return LOST;
    if (all) {
        const char *at = strstr(all, function);
        size_t length = strlen(function);
        if (at && at[length] == ':')
            return atoi(at + length + 1);
    }
    return OK;
}

static int names(const char *all, const char *function)
{
    size_t length = strlen(function);
    for (const char *at = all; at && *at; at += strcspn(at, ","), at += *at == ',')
        if (!strncmp(at, function, length) && (at[length] == ',' || !at[length]))
            return 1;
    return 0;
}

/* The line of a device, or of the driver for NULL. */
static int find_now(void *handle, const char *function, const char **line)
{
    int error = load(), left = (int)((size_t)handle / HANDLES_OF_ONE), at = 0;
    int instance = (int)((size_t)handle % HANDLES_OF_ONE);
    if (error)
        return error;
    for (; at < count; at++)
        if (is(lines[at], handle ? "gpu" : "driver") && --left <= 0)
            break;
    if (at == count)
        return handle ? INVALID : OK;
    error = failure(lines[at], function);
    while (!error && instance--)
        if (++at == count || !is(lines[at], "mig"))
            return NOT_FOUND;
    *line = lines[at];
    return error;
}

static int find(void *handle, const char *function, const char **line)
{
    for (;; usleep(HANG_STEP_US)) {
        *line = "";
        int error = find_now(handle, function, line);
        if (!names(field(*line, "hang"), function))
            return error;
    }
}

#define FIND(handle, function)                          \
    const char *line = "";                              \
    int error = find(handle, function, &line);          \
    if (error)                                          \
        return error

static int text(const char *value, char *into, unsigned size)
{
    if (!value)
        return NOT_SUPPORTED;
    snprintf(into, size, "%s", value);
    return OK;
}

static int amount(const char *line, const char *name, unsigned *into)
{
    if (!field(line, name))
        return NOT_SUPPORTED;
    *into = (unsigned)number(line, name, 0);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; FIND(NULL, "Init"); return OK; }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code)
{
    switch (code) {
    case NOT_LOADED: return "Driver Not Loaded";
    case LOST: return "GPU is lost";
    case NOT_SUPPORTED: return "Not Supported";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *into, unsigned size)
{
    FIND(NULL, "GetDriverVersion");
    return text(field(line, "version"), into, size);
}

int nvmlDeviceGetCount_v2(unsigned *into)
{
    FIND(NULL, "GetCount");
    *into = 0;
    for (int at = 0; at < count; at++)
        *into += is(lines[at], "gpu");
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **into)
{
    *into = (void *)(size_t)((index + 1) * HANDLES_OF_ONE);
    FIND(*into, "GetHandle");
    return OK;
}

int nvmlDeviceGetUUID(void *device, char *into, unsigned size)
{
    FIND(device, "GetUUID");
    return text(field(line, "uuid"), into, size);
}

int nvmlDeviceGetName(void *device, char *into, unsigned size)
{
    FIND(device, "GetName");
    return text(field(line, "name"), into, size);
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *into)
{
    FIND(device, "GetMemoryInfo");
    into->total = number(line, "memory", 0);
    into->used = number(line, "used", 0);
    into->free = into->total - into->used;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *device, rates_t *into)
{
    FIND(device, "GetUtilizationRates");
    into->memory = 0;
    return amount(line, "busy", &into->gpu);
}

int nvmlDeviceGetPciInfo_v3(void *device, pci_t *into)
{
    FIND(device, "GetPciInfo");
    memset(into, 0, sizeof *into);
    return text(field(line, "bus"), into->bus_id, sizeof into->bus_id);
}

#define AMOUNT(function, name)                                    \
    int nvmlDevice##function(void *device, unsigned *into)        \
    {                                                             \
        FIND(device, #function);                                  \
        return amount(line, name, into);                          \
    }
AMOUNT(GetMaxPcieLinkGeneration, "generation")
AMOUNT(GetMaxPcieLinkWidth, "width")
AMOUNT(GetCurrPcieLinkGeneration, "generation_now")
AMOUNT(GetCurrPcieLinkWidth, "width_now")
AMOUNT(GetComputeMode, "compute_mode")

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *into)
{
    FIND(device, "GetMaxMigDeviceCount");
    *into = 7;
    return OK;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed)
{
    FIND(device, "GetRemappedRows");
    *corrected = *uncorrected = *pending = 0;
    return amount(line, "remapping_failed", failed);
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    FIND(device, "GetMigMode");
    *pending = 0;
    return amount(line, "mig", current);
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **into)
{
    *into = (char *)device + index + 1;
    FIND(*into, "GetMigDeviceHandle");
    return OK;
}

int nvmlDeviceGetAttributes_v2(void *device, attributes_t *into)
{
    FIND(device, "GetAttributes");
    memset(into, 0, sizeof *into);
    into->memory_mib = number(line, "memory", 0) >> 20;
    into->gpu_slices = into->compute_slices = (unsigned)number(line, "slices", 0);
    return OK;
}

int nvmlDeviceGetGpuInstanceProfileInfo(void *device, unsigned profile, profile_t *into)
{
    FIND(device, "GetGpuInstanceProfileInfo");
    memset(into, 0, sizeof *into);
    into->slices = (unsigned)number(line, "slices", 0);
    if (!into->slices || into->slices != (profile == 5 ? 8U : profile == 4 ? 7U : 4U))
        return NOT_SUPPORTED;
    return OK;
}

/* What the card's link of this number leads to: a bus, `switch` or `off`; NULL when there is none. */
static const char *linked(const char *line, unsigned link)
{
    char *rest = field(line, "links"), *each = rest ? strtok(rest, ",") : NULL;
    while (each && link--)
        each = strtok(NULL, ",");
    return each;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *into)
{
    FIND(device, "GetNvLinkState");
    const char *to = linked(line, link);
    if (!to)
        return INVALID;
    *into = strcmp(to, "off") != 0;
    return OK;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, unsigned *into)
{
    FIND(device, "GetNvLinkRemoteDeviceType");
    const char *to = linked(line, link);
    *into = to && !strcmp(to, "switch") ? 2 : 0;
    return OK;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_t *into)
{
    FIND(device, "GetNvLinkRemotePciInfo");
    memset(into, 0, sizeof *into);
    return text(linked(line, link), into->bus_id, sizeof into->bus_id);
}

static int processes(const char *all, unsigned *size, process_t *into)
{
    unsigned found = 0, room = *size;
    for (char *each = all ? strtok((char *)all, ",") : NULL; each; each = strtok(NULL, ",")) {
        if (into && found < room) {
            memset(&into[found], 0, sizeof *into);
            into[found].pid = (unsigned)strtoul(each, &each, 10);
            into[found].memory = *each ? strtoull(each + 1, NULL, 10) : ~0ULL;
        }
        found++;
    }
    *size = found;
    return found > (into ? room : 0) ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *size, process_t *into)
{
    FIND(device, "GetComputeRunningProcesses");
    return processes(field(line, "processes"), size, into);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *size, process_t *into)
{
    FIND(device, "GetMPSComputeRunningProcesses");
    return processes(field(line, "mps_processes"), size, into);
}

int nvmlDeviceGetProcessUtilization(void *device, sample_t *into, unsigned *size, unsigned long long since)
{
    FIND(device, "GetProcessUtilization");
    unsigned found = 0, room = *size;
    char *all = field(line, "utilisation"), *each = all ? strtok(all, ",") : NULL;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (!all)
        return NOT_SUPPORTED;
    for (; each; each = strtok(NULL, ",")) {
        sample_t sample = {.pid = (unsigned)strtoul(each, &each, 10)};
        sample.sm = (unsigned)strtoul(each + 1, &each, 10);
        sample.stamp = *each ? strtoull(each + 1, NULL, 10) : now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
        if (sample.stamp <= since)
            continue;
        if (into && found < room)
            into[found] = sample;
        found++;
    }
    *size = found;
    if (!found)
        return NOT_FOUND;
    return found > (into ? room : 0) ? TOO_SMALL : OK;
}
