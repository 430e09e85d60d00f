/*
 * A sandbox's cgroups: a directory in each tree, with every limit in force before anything runs in it.
 *
 * What fails here leaves nothing. Where a process is, or is about to end, they are the daemon's to remove.
 */
#include "spawner.h"

#include <sys/stat.h>

void groups_close(struct groups *groups)
{
    for (int i = 0; i < DSEC_TREES_MAX; i++) {
        close_if_open(groups->directories[i]);
        close_if_open(groups->enter[i]);
        groups->directories[i] = groups->enter[i] = -1;
    }
}

static int make_directories(struct groups *groups, const char *name, const int *parents, int count,
                            struct failure *failure)
{
    for (; groups->made < count; groups->made++) {
        int tree = groups->made;
        if (mkdirat(parents[tree], name, 0755) < 0)
            return fail(failure, STEP_CGROUP_MAKE);
        groups->directories[tree] = openat(parents[tree], name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (groups->directories[tree] < 0) {
            groups->made++; /* this one, too, is there */
            return fail(failure, STEP_CGROUP_MAKE);
        }
    }
    return 0;
}

static int write_text(int directory, const char *name, const char *text)
{
    int fd = openat(directory, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t size = (ssize_t)strlen(text), written = write(fd, text, (size_t)size);
    int saved = errno;
    close(fd);
    errno = saved;
    return written == size ? 0 : -1;
}

const char *take_text(const char **at, const char *end)
{
    const char *found = *at, *zero = found < end ? memchr(found, 0, (size_t)(end - found)) : NULL;
    *at = zero ? zero + 1 : end;
    return zero ? found : NULL;
}

static int write_settings(struct groups *groups, int count, const char *at, const char *end,
                          struct failure *failure)
{
    for (; at < end; groups->written++) {
        int tree = *at++;
        const char *name = take_text(&at, end), *text = take_text(&at, end);
        if (tree == DSEC_SETTING_DEVICE)
            continue;
        if (tree < 0 || tree >= count || !name || !text || strchr(name, '/')) {
            errno = EINVAL;
            return fail(failure, STEP_PROTOCOL);
        }
        if (write_text(groups->directories[tree], name, text) < 0)
            return fail(failure, STEP_CGROUP_LIMIT);
    }
    return 0;
}

/* By writing here a process enters by itself: attaching one by its id waits for an RCU grace period. */
static int open_entries(struct groups *groups, int count, struct failure *failure)
{
    for (int tree = 1; tree < count; tree++) {
        groups->enter[tree] = openat(groups->directories[tree], "tasks", O_WRONLY | O_CLOEXEC);
        if (groups->enter[tree] < 0)
            return fail(failure, STEP_CGROUP_MAKE);
    }
    return 0;
}

int groups_make(const struct spawner_request *request, const int *parents, struct groups *groups,
                struct failure *failure)
{
    int count = 1 + (int)request->controller_count;

    groups->made = 0;
    groups->written = 0;
    for (int i = 0; i < DSEC_TREES_MAX; i++)
        groups->directories[i] = groups->enter[i] = -1;
    if (make_directories(groups, request->cgroup, parents, count, failure) == 0 &&
        write_settings(groups, count, request->settings, request->settings + request->settings_bytes, failure) == 0 &&
        open_entries(groups, count, failure) == 0)
        return 0;
    groups_remove(request, parents, groups);
    return -1;
}

void groups_remove(const struct spawner_request *request, const int *parents, struct groups *groups)
{
    groups_close(groups);
    for (; groups->made > 0; groups->made--)
        (void)unlinkat(parents[groups->made - 1], request->cgroup, AT_REMOVEDIR);
}
