/*
 * Snapshots: the writable layer of a sandbox, copied into a file system of its own while the sandbox stands still.
 *
 *   tmpfs of the wanted size -> helper process -> freeze -> copy -> thaw -> fold in held layers -> result
 *
 * The helper does all that touches the sandbox's files, so whatever they are, the spawner goes on at once. It thaws
 * on every way out: on failure, when its time is over, when the spawner dies. Should it be killed itself, its end
 * of the result socket closes and the daemon thaws.
 *
 * The copy lives as long as somebody holds the mount that the reply carries; a failed one needs no undoing.
 */
#include "snapshot.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/vfs.h>
#include <time.h>

#define FREEZE_TIMEOUT_MS 2000
#define COPY_TIMEOUT_S 8      /* a file operation in a sandbox is given 10 s: none times out for a snapshot */
#define HELPER_START_TIMEOUT_MS 10000
#define OWN_INODES 16         /* of the file system itself, and the directories beside the copy */

static volatile sig_atomic_t expired;

struct job {
    int cgroup_fd;  /* the sandbox's v2 directory; -1 when nothing is to be frozen */
    int upper_fd;   /* the sandbox's upper directory; -1 when only layers are folded */
    uint32_t base_id;
    int fold_fds[DSEC_LAYERS_MAX];
    int fold_count;
    int room_fd;    /* the new file system: `tree` and, while we copy, `links` */
    int result_fd;
};

static void on_signal(int signal_number)
{
    (void)signal_number;
    expired = 1;
}

static uint64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* ---- freezing ---- */

static int write_freeze(int cgroup_fd, const char *text)
{
    int fd = openat(cgroup_fd, "cgroup.freeze", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int result = write(fd, text, 1) == 1 ? 0 : -1;
    int saved = errno;
    close(fd);
    errno = saved;
    return result;
}

static bool stands_still(int events_fd)
{
    char text[128];
    ssize_t size = pread(events_fd, text, sizeof text - 1, 0);
    text[size < 0 ? 0 : size] = 0;
    return strstr(text, "frozen 1") != NULL;
}

/* Returns whether the sandbox was frozen before we came: then it is not ours to thaw. */
static bool is_frozen(int cgroup_fd)
{
    char state = '0';
    int fd = openat(cgroup_fd, "cgroup.freeze", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, &state, 1) != 1)
        state = '0';
    close_if_open(fd);
    return state == '1';
}

static int freeze(int cgroup_fd)
{
    int events_fd = openat(cgroup_fd, "cgroup.events", O_RDONLY | O_CLOEXEC);
    uint64_t deadline_us = now_us() + FREEZE_TIMEOUT_MS * 1000ULL;
    int result = events_fd < 0 ? -1 : write_freeze(cgroup_fd, "1");

    while (result == 0 && !stands_still(events_fd)) {
        struct pollfd polled = {.fd = events_fd, .events = POLLPRI};
        if (expired || now_us() > deadline_us) {
            errno = ETIMEDOUT;
            result = -1;
        } else {
            poll(&polled, 1, 10);
        }
    }
    int saved = errno;
    close_if_open(events_fd);
    errno = saved;
    return result;
}

/* ---- the helper ---- */

static int copy_sources(const struct job *job, struct snapshot_result *result, struct failure *failure)
{
    int tree_fd = openat(job->room_fd, "tree", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int links_fd = openat(job->room_fd, "links", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct tree_copy copy = {.links_fd = links_fd, .expired = &expired, .failure = failure};
    bool fresh = true;

    if (tree_fd < 0 || links_fd < 0)
        return fail(failure, STEP_SNAPSHOT_COPY);
    if (job->upper_fd >= 0) {
        struct tree_source source = {.root_fd = job->upper_fd, .base_id = job->base_id};
        bool thaw = false;
        uint64_t begun_us = now_us();
        int done = 0;
        if (job->cgroup_fd >= 0 && !is_frozen(job->cgroup_fd)) {
            thaw = true;
            done = freeze(job->cgroup_fd) < 0 ? fail(failure, STEP_SNAPSHOT_FREEZE) : 0;
        }
        if (done == 0)
            done = copy_tree(&source, tree_fd, fresh, &copy);
        if (thaw)
            write_freeze(job->cgroup_fd, "0");
        result->frozen_us = now_us() - begun_us;
        if (done < 0)
            return -1;
        fresh = false;
    }
    for (int i = 0; i < job->fold_count; i++, fresh = false) {
        struct tree_source source = {.root_fd = job->fold_fds[i], .dense = true};
        if (copy_tree(&source, tree_fd, fresh, &copy) < 0)
            return -1;
    }
    result->entries = copy.entries;
    result->hole_bytes = copy.hole_bytes;
    return unlinkat(job->room_fd, "links", AT_REMOVEDIR) < 0 ? fail(failure, STEP_SNAPSHOT_COPY) : 0;
}

static void watch_time(pid_t spawner)
{
    struct sigaction action = {.sa_handler = on_signal};
    struct itimerval limit = {.it_value = {.tv_sec = COPY_TIMEOUT_S}};

    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    setitimer(ITIMER_REAL, &limit, NULL);
    /* Its death ends us, but not before the sandbox runs again. */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != spawner)
        expired = 1;
}

static _Noreturn void helper_main(const struct job *job, pid_t spawner)
{
    struct snapshot_result result = {0};
    struct failure failure = {STEP_NONE, 0};
    struct statfs used;
    uint64_t begun_us = now_us();

    watch_time(spawner);
    prctl(PR_SET_NAME, "dsec-snapshot");
    /* A table of our own, without the spawner's long-lived descriptors: then it may close what it gave us. */
    if (sys_close_range(LONG_LIVED_FD_MIN, ~0U, CLOSE_RANGE_UNSHARE) < 0)
        _exit(1);
    if (packet_send(job->result_fd, "h", 1, NULL, 0, 0) < 0)
        _exit(1);
    write_oom_score(getpid());
    if (copy_sources(job, &result, &failure) < 0) {
        result.error = failure.error;
        result.step = failure.step;
    } else if (fstatfs(job->room_fd, &used) == 0) {
        result.bytes = (uint64_t)(used.f_blocks - used.f_bfree) * (uint64_t)used.f_bsize;
        result.inodes = used.f_files - used.f_ffree;
    }
    result.total_us = now_us() - begun_us;
    packet_send(job->result_fd, &result, sizeof result, NULL, 0, 0);
    _exit(0);
}

/* ---- the spawner's part ---- */

static int make_room(const struct spawner_request *request, struct failure *failure)
{
    char number[32];
    int context = fsopen("tmpfs", FSOPEN_CLOEXEC), room_fd = -1;

    if (context < 0)
        return fail(failure, STEP_SNAPSHOT_ROOM);
    snprintf(number, sizeof number, "%llu", (unsigned long long)request->disk_bytes);
    int made = fsconfig(context, FSCONFIG_SET_STRING, "source", "dsec", 0) == 0 &&
               fsconfig(context, FSCONFIG_SET_STRING, "mode", "0700", 0) == 0 &&
               fsconfig(context, FSCONFIG_SET_STRING, "size", number, 0) == 0;
    snprintf(number, sizeof number, "%llu", (unsigned long long)request->inodes + OWN_INODES);
    if (made && fsconfig(context, FSCONFIG_SET_STRING, "nr_inodes", number, 0) == 0 &&
        fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        room_fd = fsmount(context, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    if (room_fd < 0 || mkdirat(room_fd, "tree", 0755) < 0 || mkdirat(room_fd, "links", 0700) < 0) {
        fail(failure, STEP_SNAPSHOT_ROOM);
        close_if_open(room_fd);
        room_fd = -1;
    }
    close(context);
    return room_fd;
}

/* The copy as a layer: read-only and without what lies beside it. */
static int open_as_layer(int room_fd, struct failure *failure)
{
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV,
                                    .attr_clr = MOUNT_ATTR_NOEXEC};
    int fd = open_tree(room_fd, "tree", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (fd >= 0 && mount_setattr(fd, "", AT_EMPTY_PATH, &attributes, sizeof attributes) < 0) {
        fail(failure, STEP_SNAPSHOT_ROOM);
        close(fd);
        return -1;
    }
    return fd < 0 ? fail(failure, STEP_SNAPSHOT_ROOM) : fd;
}

/* Low duplicates of the held layers: the helper gives up the range they are in. */
static int open_sources(const struct spawner_request *request, const struct slot *slot, const int *layer_fds,
                        struct job *job, struct failure *failure)
{
    if (slot) {
        job->upper_fd = openat(slot->writable_fd, "upper", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (job->upper_fd < 0)
            return fail(failure, STEP_SNAPSHOT_COPY);
        job->base_id = slot->base_id;
    }
    for (uint32_t i = 0; i < request->layer_count; i++) {
        int fd = fcntl(layer_fds[i], F_DUPFD_CLOEXEC, 3);
        if (fd < 0)
            return fail(failure, STEP_SNAPSHOT_COPY);
        job->fold_fds[job->fold_count++] = fd;
    }
    return 0;
}

static int start_helper(const struct job *job, int host_end, struct failure *failure)
{
    int pidfd = -1, none[DSEC_DESCRIPTORS_MAX], count;
    char here;
    pid_t spawner = getpid();
    struct clone_arguments arguments = {.flags = CLONE_FILES | CLONE_PIDFD,
                                        .pidfd = (uint64_t)(uintptr_t)&pidfd,
                                        .exit_signal = SIGCHLD};
    pid_t pid = (pid_t)sys_clone3(&arguments);
    if (pid < 0)
        return fail(failure, STEP_SNAPSHOT_HELPER);
    if (pid == 0)
        helper_main(job, spawner);
    /* Its end of the socket is open in our table too, so its death is seen by its pidfd. */
    struct pollfd polled[2] = {{.fd = host_end, .events = POLLIN}, {.fd = pidfd, .events = POLLIN}};
    int ready;
    do
        ready = poll(polled, 2, HELPER_START_TIMEOUT_MS);
    while (ready < 0 && errno == EINTR);
    int result = 0;
    if (ready <= 0 || !(polled[0].revents & POLLIN) ||
        packet_receive(host_end, &here, 1, none, &count, 0) != 1) {
        errno = ready == 0 ? ETIMEDOUT : ECHILD;
        result = fail(failure, STEP_SNAPSHOT_HELPER);
        sys_pidfd_send_signal(pidfd, SIGKILL);
    }
    close(pidfd);
    return result;
}

int snapshot_begin(const struct spawner_request *request, const struct slot *slot, const int *layer_fds,
                   int cgroup_fd, int *reply_fds, struct failure *failure)
{
    int ends[2] = {-1, -1}, layer_fd = -1, result = -1;
    struct job job = {.cgroup_fd = cgroup_fd, .upper_fd = -1, .room_fd = -1, .result_fd = -1};

    if (open_sources(request, slot, layer_fds, &job, failure) < 0)
        goto out;
    job.room_fd = make_room(request, failure);
    layer_fd = job.room_fd < 0 ? -1 : open_as_layer(job.room_fd, failure);
    if (layer_fd < 0)
        goto out;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0) {
        fail(failure, STEP_CONTROL_SOCKET);
        goto out;
    }
    job.result_fd = ends[1];
    result = start_helper(&job, ends[0], failure);
out:
    close_if_open(job.upper_fd);
    close_if_open(job.room_fd);
    close_if_open(job.result_fd);
    for (int i = 0; i < job.fold_count; i++)
        close(job.fold_fds[i]);
    if (result < 0) {
        close_if_open(ends[0]);
        close_if_open(layer_fd);
        return -1;
    }
    reply_fds[0] = ends[0];
    reply_fds[1] = layer_fd;
    return 0;
}
