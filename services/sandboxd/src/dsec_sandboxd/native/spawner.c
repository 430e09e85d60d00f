/*
 * The spawner: creates sandboxes for one daemon, so that nothing forks from the Python process.
 *
 *   spawner SOCKET_FD INIT_PATH FILTER_FD
 *
 * It answers one request at a time and ends with its daemon (end of file on the socket, or the daemon's
 * death). Sandboxes live on: their control sockets are their own. While it waits for a child to start, it
 * makes the cgroups of the next one.
 */
#include "spawner.h"

#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <linux/securebits.h>

#define CHILD_TIMEOUT_MS 10000

static struct host host;
static struct slot slots[DSEC_SLOTS_MAX];
static int layers[DSEC_LAYER_HANDLES];
static int intake; /* the socket to the daemon */

/* A request, and the cgroups that were made for it before its turn, or why they were not. */
struct turn {
    struct spawner_request request;
    int fds[DSEC_DESCRIPTORS_MAX], count;
    ssize_t size;
    int error; /* why size is less than 0 */
    bool is_here, is_over, has_groups;
    int result;
    struct groups groups;
    struct failure failure;
};
static struct turn turns[2], *next = &turns[0];

int fail(struct failure *failure, enum dsec_step step)
{
    failure->step = step;
    failure->error = errno ? errno : EIO;
    return -1;
}

int make_long_lived(int fd)
{
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, LONG_LIVED_FD_MIN);
    int saved = errno;
    close(fd);
    errno = saved;
    return moved;
}

int refuse(struct failure *failure, int error)
{
    errno = error;
    return fail(failure, STEP_PROTOCOL);
}

static int hold(const struct spawner_request *request, const int *fds, int count, struct failure *failure)
{
    if (request->layer >= DSEC_LAYER_HANDLES || count != 1)
        return refuse(failure, EINVAL);
    if (layers[request->layer])
        return refuse(failure, EEXIST);
    int mount_fd = request->flags & HOLD_IS_MOUNT ? copy_of_mount(fds[0], failure) : mount_layer(fds[0], failure);
    if (mount_fd < 0)
        return -1;
    mount_fd = make_long_lived(mount_fd);
    if (mount_fd < 0)
        return fail(failure, STEP_LAYER_MOUNT);
    layers[request->layer] = mount_fd;
    return 0;
}

static int drop(const struct spawner_request *request, struct failure *failure)
{
    if (request->layer >= DSEC_LAYER_HANDLES)
        return refuse(failure, EINVAL);
    if (layers[request->layer])
        release_mount(layers[request->layer]);
    layers[request->layer] = 0;
    return 0;
}

static int check_slot(const struct spawner_request *request, struct failure *failure)
{
    /* Ids of the host itself (below 65536) must never be given away. */
    if (request->slot >= DSEC_SLOTS_MAX || request->base_id < 65536 || request->base_id > UINT32_MAX - 131072)
        return refuse(failure, EINVAL);
    struct slot *slot = &slots[request->slot];
    if (slot->mapping_fd && slot->base_id != request->base_id)
        return refuse(failure, EEXIST);
    return 0;
}

/* Whether it is one new entry of a directory. */
static int is_name(const char *name, size_t capacity)
{
    return memchr(name, 0, capacity) && *name && strcmp(name, ".") && strcmp(name, "..") && !strchr(name, '/');
}

/* Whether a creation is well formed, whatever is there. */
static bool is_creation(const struct spawner_request *request, int count)
{
    return request->layer_count >= 1 && request->layer_count <= DSEC_LAYERS_MAX &&
           request->controller_count <= DSEC_CONTROLLERS_MAX &&
           count == 1 + (int)request->controller_count + EXTRA_MOUNTS(request) &&
           memchr(request->hostname, 0, sizeof request->hostname) && request->disk_bytes && request->inodes &&
           is_name(request->cgroup, sizeof request->cgroup) && request->settings_bytes <= sizeof request->settings;
}

static int check_create(const struct spawner_request *request, int *layer_fds, int count, struct failure *failure)
{
    if (check_slot(request, failure) < 0)
        return -1;
    if (!is_creation(request, count))
        return refuse(failure, EINVAL);
    for (uint32_t i = 0; i < request->layer_count; i++) {
        if (request->layers[i] >= DSEC_LAYER_HANDLES || !layers[request->layers[i]])
            return refuse(failure, ENOENT);
        layer_fds[i] = layers[request->layers[i]];
    }
    if (slots[request->slot].writable_fd)
        return refuse(failure, EBUSY);
    return 0;
}

/* Clone into every namespace and the v2 cgroup, with the sandbox's base id as the effective one. */
static pid_t clone_child(const struct child_plan *plan, const struct slot *slot, int cgroup_fd, int *pidfd,
                         struct failure *failure)
{
    struct clone_arguments arguments = {
        .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_PIDFD |
                 CLONE_FILES | CLONE_INTO_CGROUP,
        .pidfd = (uint64_t)(uintptr_t)pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = (uint64_t)cgroup_fd,
    };
    if (setns(slot->network_fd, CLONE_NEWNET) < 0) {
        fail(failure, STEP_ENTER_NETWORK_NAMESPACE);
        return -1;
    }
    /*
     * The user namespace's owner pays for its inotify instances, mounts and so on: were it root, one
     * sandbox could use up the whole node's. SECBIT_NO_SETUID_FIXUP keeps our capabilities.
     */
    pid_t pid = -1;
    if (syscall(SYS_setresuid, -1, slot->base_id, -1) < 0) {
        fail(failure, STEP_CLONE);
    } else {
        pid = (pid_t)sys_clone3(&arguments);
        if (pid == 0)
            child_main(plan);
        if (pid < 0)
            fail(failure, STEP_CLONE);
    }
    /* Neither can fail for a process that has every capability; if one did, going on would be unsafe. */
    if (syscall(SYS_setresuid, -1, 0, -1) < 0 || setns(host.own_network_fd, CLONE_NEWNET) < 0)
        abort();
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a change of identity forgets it */
    return pid;
}

static void receive(struct turn *turn, int flags)
{
    memset(&turn->request, 0, sizeof turn->request);
    turn->size = packet_receive(intake, &turn->request, sizeof turn->request, turn->fds, &turn->count, flags);
    turn->error = turn->size < 0 ? errno : 0;
    turn->has_groups = false;
    turn->is_here = turn->error != EAGAIN;
    bool is_cut = turn->error == EMSGSIZE || turn->error == EMFILE;
    turn->is_over = turn->size == 0 || (turn->error && turn->is_here && !is_cut);
}

/* Make the cgroups of what is asked for next, if that is known already and is a sandbox. */
static void look_ahead(void)
{
    if (!next->is_here)
        receive(next, MSG_DONTWAIT);
    if (next->has_groups || next->size != (ssize_t)sizeof next->request || next->request.kind != SPAWNER_CREATE ||
        !is_creation(&next->request, next->count))
        return;
    next->result = groups_make(&next->request, next->fds, &next->groups, &next->failure);
    next->has_groups = true;
}

/*
 * Wait until the child has spoken or is dead. Its end of the socket is open in our table too, so that a child
 * killed before its first word (by the memory limit, say) would not end the wait, and nothing could be created
 * any more.
 */
static int wait_for_child(int host_end, int pidfd)
{
    struct pollfd polled[2] = {{.fd = host_end, .events = POLLIN}, {.fd = pidfd, .events = POLLIN}};
    int count;
    look_ahead();
    do
        count = poll(polled, 2, CHILD_TIMEOUT_MS);
    while (count < 0 && errno == EINTR);
    if (count > 0 && polled[0].revents & POLLIN)
        return 0;
    if (count >= 0)
        errno = count ? ECHILD : ETIMEDOUT;
    return -1;
}

/* Let the child go on once its ids are mapped and its root is made. */
static int release_child(const struct spawner_request *request, const int *layer_fds, const struct slot *slot,
                         pid_t pid, int pidfd, int host_end, const int *extra_fds, struct sandbox_mounts *mounts,
                         struct failure *failure)
{
    char map[64];
    snprintf(map, sizeof map, "0 %u 65536\n", slot->base_id);
    if (write_id_maps(pid, map) < 0)
        return fail(failure, STEP_ID_MAP);
    if (write_oom_score(pid) < 0)
        return fail(failure, STEP_OOM_SCORE);
    if (mount_root(request, layer_fds, slot->mapping_fd, mounts, failure) < 0)
        return -1;
    int fds[6] = {mounts->overlay_fd, mounts->shared_fd, mounts->writable_fd, mounts->furniture_fd};
    for (int i = 0; i < EXTRA_MOUNTS(request); i++)
        fds[4 + i] = extra_fds[i];
    struct control_reply ready;
    int none[DSEC_DESCRIPTORS_MAX], count;
    if (wait_for_child(host_end, pidfd) < 0)
        return fail(failure, STEP_HANDSHAKE);
    /* The child's table is its own from here on, so that ours may be closed. */
    ssize_t size = packet_receive(host_end, &ready, sizeof ready, none, &count, 0);
    if (size != sizeof ready)
        return fail(failure, STEP_HANDSHAKE);
    if (ready.error) {
        errno = ready.error;
        return fail(failure, (enum dsec_step)ready.step);
    }
    if (packet_send(host_end, "g", 1, fds, 4 + EXTRA_MOUNTS(request), 0) < 0)
        return fail(failure, STEP_HANDSHAKE);
    return 0;
}

/* Make the process in cgroups that are there, and all that it has. */
static int give_birth(const struct spawner_request *request, const int *layer_fds, const struct groups *groups,
                      const int *extra_fds, struct spawner_reply *reply, int *reply_fds, struct failure *failure)
{
    int ends[2] = {-1, -1}, pidfd = -1;
    struct sandbox_mounts mounts = {-1, -1, -1, -1};
    struct slot *slot = &slots[request->slot];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
        return fail(failure, STEP_CONTROL_SOCKET);
    struct child_plan plan = {&host, request, ends[0], ends[1], groups->enter + 1};
    pid_t pid = clone_child(&plan, slot, groups->directories[0], &pidfd, failure);
    int result = -1;
    if (pid > 0) {
        result = release_child(request, layer_fds, slot, pid, pidfd, ends[1], extra_fds, &mounts, failure);
        if (result < 0)
            sys_pidfd_send_signal(pidfd, SIGKILL);
    }
    close(ends[0]);
    close_if_open(mounts.overlay_fd);
    close_if_open(mounts.shared_fd);
    close_if_open(mounts.furniture_fd);
    if (result < 0) {
        close_if_open(mounts.writable_fd);
        close_if_open(pidfd);
        close(ends[1]);
        return -1;
    }
    /* Kept until RELEASE: letting go of a mount takes longer than creating one. */
    int kept = make_long_lived(mounts.writable_fd);
    slot->writable_fd = kept < 0 ? 0 : kept;
    reply->pid = pid;
    reply_fds[0] = pidfd;
    reply_fds[1] = ends[1];
    return 0;
}

static int create(struct turn *turn, struct spawner_reply *reply, int *reply_fds, struct failure *failure)
{
    const struct spawner_request *request = &turn->request;
    int layer_fds[DSEC_LAYERS_MAX];

    if (check_create(request, layer_fds, turn->count, failure) < 0 ||
        slot_warm(&slots[request->slot], request->base_id, host.own_network_fd, failure) < 0) {
        if (turn->has_groups && turn->result == 0)
            groups_remove(request, turn->fds, &turn->groups);
        return -1;
    }
    if (!turn->has_groups)
        turn->result = groups_make(request, turn->fds, &turn->groups, &turn->failure);
    if (turn->result < 0) {
        reply->detail = turn->groups.written;
        *failure = turn->failure;
        return -1;
    }
    const int *extra_fds = turn->fds + turn->count - EXTRA_MOUNTS(request);
    if (give_birth(request, layer_fds, &turn->groups, extra_fds, reply, reply_fds, failure) < 0) {
        groups_remove(request, turn->fds, &turn->groups);
        return -1;
    }
    groups_close(&turn->groups);
    return 0;
}

static int release(const struct spawner_request *request, struct failure *failure)
{
    if (request->slot >= DSEC_SLOTS_MAX)
        return refuse(failure, EINVAL);
    struct slot *slot = &slots[request->slot];
    slot_release_layer(slot);
    slot_renew_network(slot, host.own_network_fd);
    return 0;
}

/* Hold what an earlier spawner held of a sandbox that lives: its writable layer and its network namespace. */
static int adopt(const struct spawner_request *request, const int *fds, int count, struct failure *failure)
{
    if (check_slot(request, failure) < 0)
        return -1;
    struct slot *slot = &slots[request->slot];
    if (count != 2)
        return refuse(failure, EINVAL);
    if (slot->writable_fd)
        return refuse(failure, EBUSY);
    int writable_fd = fcntl(fds[0], F_DUPFD_CLOEXEC, LONG_LIVED_FD_MIN);
    int network_fd = fcntl(fds[1], F_DUPFD_CLOEXEC, LONG_LIVED_FD_MIN);
    if (writable_fd < 0 || network_fd < 0) {
        fail(failure, STEP_WRITABLE_LAYER);
        close_if_open(writable_fd);
        close_if_open(network_fd);
        return -1;
    }
    if (slot->network_fd)
        close(slot->network_fd); /* made ahead of need; nobody has it */
    slot->base_id = request->base_id;
    slot->writable_fd = writable_fd;
    slot->network_fd = network_fd;
    return 0;
}

static int resize_made(const struct spawner_request *request, int count, struct failure *failure)
{
    if (check_slot(request, failure) < 0)
        return -1;
    const struct slot *slot = &slots[request->slot];
    if (count != 0 || !request->disk_bytes || !request->inodes)
        return refuse(failure, EINVAL);
    if (!slot->writable_fd)
        return refuse(failure, ESRCH);
    return resize_writable(request, slot, failure);
}

static int lend(const struct spawner_request *request, const int *fds, int count, struct failure *failure)
{
    if (check_slot(request, failure) < 0)
        return -1;
    struct slot *slot = &slots[request->slot];
    if (!slot->writable_fd)
        return refuse(failure, ESRCH);
    if (slot_warm(slot, request->base_id, host.own_network_fd, failure) < 0)
        return -1;
    return lend_to(request, slot, request->layer < DSEC_LAYER_HANDLES ? layers[request->layer] : 0, fds, count, failure);
}

static int snapshot(const struct spawner_request *request, const int *fds, int count, int *reply_fds,
                    struct failure *failure)
{
    int layer_fds[DSEC_LAYERS_MAX];
    const struct slot *slot = NULL;

    if (count > 1 || request->layer_count > DSEC_LAYERS_MAX || !request->disk_bytes || !request->inodes ||
        (count == 0 && !request->layer_count))
        return refuse(failure, EINVAL);
    if (count == 1) {
        if (check_slot(request, failure) < 0)
            return -1;
        slot = &slots[request->slot];
        if (!slot->writable_fd)
            return refuse(failure, ESRCH);
    }
    for (uint32_t i = 0; i < request->layer_count; i++) {
        if (request->layers[i] >= DSEC_LAYER_HANDLES || !layers[request->layers[i]])
            return refuse(failure, ENOENT);
        layer_fds[i] = layers[request->layers[i]];
    }
    return snapshot_begin(request, slot, layer_fds, count == 1 ? fds[0] : -1, reply_fds, failure);
}

/* Answer one request. Returns -1 when the daemon is gone. */
static int serve(void)
{
    struct turn *turn = next;
    const struct spawner_request *request = &turn->request;
    struct spawner_reply reply = {0};
    struct failure failure = {STEP_NONE, 0};
    int reply_fds[2] = {-1, -1}, result;

    if (!turn->is_here)
        receive(turn, 0);
    if (turn->is_over)
        return -1;
    next = &turns[turn == &turns[0]];
    next->is_here = false;
    if (turn->size != (ssize_t)sizeof *request) {
        result = refuse(&failure, turn->error == EMFILE ? EMFILE : EPROTO);
    } else {
        switch (request->kind) {
        case SPAWNER_HOLD:
            result = hold(request, turn->fds, turn->count, &failure);
            break;
        case SPAWNER_DROP:
            result = drop(request, &failure);
            break;
        case SPAWNER_WARM:
            result = check_slot(request, &failure);
            if (result == 0)
                result = slot_warm(&slots[request->slot], request->base_id, host.own_network_fd, &failure);
            break;
        case SPAWNER_CREATE:
            result = create(turn, &reply, reply_fds, &failure);
            break;
        case SPAWNER_RELEASE:
            result = release(request, &failure);
            break;
        case SPAWNER_ADOPT:
            result = adopt(request, turn->fds, turn->count, &failure);
            break;
        case SPAWNER_SNAPSHOT:
            result = snapshot(request, turn->fds, turn->count, reply_fds, &failure);
            break;
        case SPAWNER_RESIZE:
            result = resize_made(request, turn->count, &failure);
            break;
        case SPAWNER_LEND:
            result = lend(request, turn->fds, turn->count, &failure);
            break;
        default:
            result = refuse(&failure, EPROTO);
        }
    }
    reply.kind = request->kind;
    reply.request_id = request->request_id;
    reply.error = result < 0 ? failure.error : 0;
    reply.step = result < 0 ? failure.step : STEP_NONE;
    int sent = packet_send(intake, &reply, sizeof reply, reply_fds, reply_fds[0] >= 0 ? 2 : 0, 0);
    close_if_open(reply_fds[0]);
    close_if_open(reply_fds[1]);
    for (int i = 0; i < turn->count; i++)
        close(turn->fds[i]);
    return sent;
}

int main(int argc, char **argv)
{
    struct failure failure = {STEP_NONE, 0};

    if (argc != 4) {
        fprintf(stderr, "usage: spawner SOCKET_FD INIT_PATH FILTER_FD\n");
        return 2;
    }
    int socket_fd = atoi(argv[1]);
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    fcntl(socket_fd, F_SETFD, FD_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, "dsec-spawner");
    signal(SIGCHLD, SIG_IGN); /* children are watched by pidfd, nobody waits for them */
    signal(SIGINT, SIG_IGN);  /* a terminal's Ctrl-C is the daemon's to handle */
    for (int number = 1; number <= 64; number++) {
        struct kernel_signal_action action;
        if (sys_signal_action(number, NULL, &action) == 0 && action.handler == (uint64_t)(uintptr_t)SIG_IGN)
            host.ignored |= 1ULL << (number - 1);
    }
    if (prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) < 0)
        fail(&failure, STEP_NAMESPACE_TREE);
    else
        host_prepare(&host, argv[2], atoi(argv[3]), &failure);
    /* Children cut off what lies above the program's descriptor: were this socket still open in one of them,
     * the daemon would not see us die. */
    if (!failure.error && (socket_fd = make_long_lived(socket_fd)) < 0)
        return 1;
    intake = socket_fd;

    struct spawner_reply hello = {.error = failure.error, .step = failure.step, .pid = getpid(),
                                  .detail = DSEC_SPAWNER_PROTOCOL};
    if (packet_send(socket_fd, &hello, sizeof hello, NULL, 0, 0) < 0 || failure.error)
        return 1;
    while (serve() == 0)
        ;
    return 0;
}
