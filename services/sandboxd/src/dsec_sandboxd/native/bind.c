/*
 * What of a sandbox made ahead of need is decided when it is handed out: the size of its writable layer. Nothing
 * inside takes part in it.
 */
#include "spawner.h"

#include <stdio.h>

static int resize(int writable_fd, uint64_t disk_bytes, uint64_t inodes)
{
    char number[32];
    int context = fspick(writable_fd, "", FSPICK_EMPTY_PATH | FSPICK_CLOEXEC);

    if (context < 0)
        return -1;
    snprintf(number, sizeof number, "%llu", (unsigned long long)disk_bytes);
    int result = fsconfig(context, FSCONFIG_SET_STRING, "size", number, 0);
    snprintf(number, sizeof number, "%llu", (unsigned long long)inodes + SKELETON_INODES + FURNITURE_INODES);
    if (result == 0)
        result = fsconfig(context, FSCONFIG_SET_STRING, "nr_inodes", number, 0);
    if (result == 0)
        result = fsconfig(context, FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0);
    int saved = errno;
    close(context);
    errno = saved;
    return result;
}

int resize_writable(const struct spawner_request *request, const struct slot *slot, struct failure *failure)
{
    if (resize(slot->writable_fd, request->disk_bytes, request->inodes) < 0)
        return fail(failure, STEP_WRITABLE_LAYER);
    return 0;
}
