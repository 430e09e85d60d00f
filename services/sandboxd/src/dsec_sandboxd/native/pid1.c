/*
 * PID 1 of a sandbox. It answers the daemon on DSEC_CONTROL_FD, runs commands (commands.c), owns the reading
 * ends of their pipes (a dead daemon must not mean SIGPIPE), reaps, and never ends by itself.
 *
 * Nobody in the sandbox can ptrace it or open its memory: its program belongs to the host's root and is
 * unreadable, so the kernel keeps it undumpable and outside the sandbox's user namespace. Signals from
 * inside are ignored by the kernel's rule for PID 1 without handlers.
 */
#include "pid1.h"

#include <linux/landlock.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define FILES_MAX 64
/* Six for each command that runs, and some to spare. */
#define DESCRIPTORS_WANTED (6 * DSEC_COMMANDS_MAX + 1024)

struct file_operation_state {
    pid_t pid; /* 0: free */
    uint32_t id;
};

static struct file_operation_state file_operations[FILES_MAX];
struct rlimit command_descriptor_limit;
struct outcome *outcomes; /* shared with children: commands first, then file operations */

static char request_buffer[sizeof(struct control_request) + DSEC_INLINE_PAYLOAD_MAX];

void tell_failure(uint32_t kind, uint32_t id, enum dsec_step step, int error)
{
    struct control_reply reply = {.kind = kind, .id = id, .error = error ? error : EIO, .step = step};
    packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, NULL, 0, 0);
}

/* ---- requests ---- */

/* Cut a payload into strings; every one must end inside it, and nothing may be left over. */
static int view_strings(struct request_view *view, char *payload, char **pointers)
{
    const struct control_request *header = view->header;
    uint64_t fixed = header->kind == CONTROL_EXEC ? 2 : file_takes_target(header->operation) ? 3 : 2;
    uint64_t total = fixed + header->argument_count + header->environment_count;
    char *end = payload + header->payload_bytes, *cursor = payload;

    for (uint64_t i = 0; i < total; i++) {
        char *nul = cursor < end ? memchr(cursor, 0, (size_t)(end - cursor)) : NULL;
        if (!nul)
            return -1;
        /* The two lists are each followed by NULL. */
        uint64_t gap = i >= fixed + header->argument_count ? 1 : 0;
        pointers[i + gap] = cursor;
        cursor = nul + 1;
    }
    pointers[fixed + header->argument_count] = NULL;
    pointers[total + 1] = NULL;
    view->user = pointers[0];
    view->path = pointers[1];
    view->target = fixed == 3 ? pointers[2] : NULL;
    view->arguments = pointers + fixed;
    view->environment = pointers + fixed + header->argument_count + 1;
    return cursor == end ? 0 : -1;
}

static char *take_payload(const struct control_request *header, ssize_t size, int payload_fd, bool *allocated)
{
    if (!(header->flags & CONTROL_PAYLOAD_IN_FD)) {
        bool whole = (size_t)size == sizeof *header + header->payload_bytes;
        return whole ? request_buffer + sizeof *header : NULL;
    }
    if (payload_fd < 0 || header->payload_bytes > DSEC_PAYLOAD_MAX || (size_t)size != sizeof *header)
        return NULL;
    char *payload = malloc(header->payload_bytes + 1);
    if (payload && pread(payload_fd, payload, header->payload_bytes, 0) != (ssize_t)header->payload_bytes) {
        free(payload);
        return NULL;
    }
    *allocated = true;
    return payload;
}

/* ---- file operations ---- */

static void start_file_operation(const struct request_view *view)
{
    int slot = 0;
    while (slot < FILES_MAX && file_operations[slot].pid)
        slot++;
    if (slot == FILES_MAX) {
        tell_failure(CONTROL_FILE_DONE, view->header->id, STEP_FILE_FORK, EBUSY); /* EAGAIN: out of processes */
        return;
    }
    struct outcome *outcome = &outcomes[DSEC_COMMANDS_MAX + slot];
    *outcome = (struct outcome){0, 0};
    pid_t pid = fork();
    if (pid == 0)
        file_child(view, outcome);
    if (pid < 0) {
        tell_failure(CONTROL_FILE_DONE, view->header->id, STEP_FILE_FORK, errno);
        return;
    }
    file_operations[slot] = (struct file_operation_state){pid, view->header->id};
}

static void handle_with_strings(const struct control_request *header, ssize_t size, int *fds, int count)
{
    uint32_t failed = header->kind == CONTROL_EXEC ? CONTROL_FAILED : CONTROL_FILE_DONE;
    int next = 0, cgroup_fd = -1, payload_fd = -1, spool_fd = -1;
    bool allocated = false, is_command = header->kind == CONTROL_EXEC;

    if (is_command && header->flags & CONTROL_WITH_CGROUP && next < count)
        cgroup_fd = fds[next++];
    if (header->flags & CONTROL_PAYLOAD_IN_FD && next < count)
        payload_fd = fds[next++];
    if (is_command && header->flags & CONTROL_KEEP_STDIN && next < count)
        spool_fd = fds[next++];
    uint64_t strings = (uint64_t)header->argument_count + header->environment_count;
    char *payload = NULL, **pointers = NULL;
    struct request_view view = {.header = header};
    if ((is_command ? header->argument_count > 0 : strings == 0) && strings <= DSEC_STRINGS_MAX)
        payload = take_payload(header, size, payload_fd, &allocated);
    if (payload)
        pointers = calloc(strings + 6, sizeof *pointers);
    if (!pointers || view_strings(&view, payload, pointers) < 0)
        tell_failure(failed, header->id, STEP_PROTOCOL, EPROTO);
    else if (is_command)
        commands_start(&view, cgroup_fd, spool_fd);
    else
        start_file_operation(&view);
    free(pointers);
    if (payload && allocated)
        free(payload);
}

static void handle_request(void)
{
    int fds[DSEC_DESCRIPTORS_MAX], count;
    ssize_t size = packet_receive(DSEC_CONTROL_FD, request_buffer, sizeof request_buffer, fds, &count, MSG_DONTWAIT);
    if (size < 0)
        return;
    const struct control_request *header = (const struct control_request *)request_buffer;
    if (size >= (ssize_t)sizeof *header) {
        if (header->kind == CONTROL_EXEC || header->kind == CONTROL_FILE)
            handle_with_strings(header, size, fds, count);
        else if (header->kind == CONTROL_SIGNAL)
            commands_signal(header, count > 0 ? fds[0] : -1);
        else if (header->kind == CONTROL_DONE)
            commands_finish(header->id);
        else if (header->kind == CONTROL_LIST)
            commands_list(header->id);
        else if (header->kind == CONTROL_CLOSE_STDIN)
            commands_close_stdin(header->id);
    }
    for (int i = 0; i < count; i++)
        close(fds[i]);
}

/* ---- ends ---- */

/* Nothing but a process of the sandbox stops a file operation, and then somebody outside waits in vain. */
static void end_stopped(pid_t pid)
{
    for (int i = 0; i < FILES_MAX; i++)
        if (file_operations[i].pid == pid)
            kill(pid, SIGKILL);
}

static void reap(void)
{
    int status;
    pid_t pid;
    bool ended = false;
    while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0) {
        if (WIFSTOPPED(status)) {
            end_stopped(pid);
            continue;
        }
        ended |= commands_note_exit(pid, status);
        for (int i = 0; i < FILES_MAX; i++) {
            if (file_operations[i].pid != pid)
                continue;
            file_operations[i].pid = 0;
            if (outcomes[DSEC_COMMANDS_MAX + i].step != STEP_COUNT)
                tell_failure(CONTROL_FILE_DONE, file_operations[i].id, STEP_FILE_CHILD_DIED, EIO);
        }
    }
    bool alone = pid < 0 && errno == ECHILD;
    if (ended)
        commands_tell(alone);
}

/* ---- start ---- */

/*
 * No device nodes, and no change of mounts for any process inside (Landlock forbids those to all it
 * confines). Only what is handled costs anything; moving files between directories must be granted back.
 */
static int confine(void)
{
    const uint64_t refer = LANDLOCK_ACCESS_FS_REFER;
    struct landlock_ruleset_attr attributes = {
        .handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_BLOCK | refer};
    long version = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    if (version < 2)
        return 0; /* the host lacks it; the daemon knows and says so */
    int ruleset = (int)syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes, 0);
    int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (ruleset < 0 || root < 0)
        return -1;
    struct landlock_path_beneath_attr rule = {.allowed_access = refer, .parent_fd = root};
    if (syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) < 0 ||
        syscall(SYS_landlock_restrict_self, ruleset, 0) < 0)
        return -1;
    close(root);
    return close(ruleset);
}

static _Noreturn void broken(enum dsec_step step)
{
    tell_failure(CONTROL_BROKEN, 0, step, errno);
    _exit(1);
}

static _Noreturn void loop(int signal_fd)
{
    static struct pollfd polled[2 + SINKS_MAX];
    for (;;) {
        bool news = commands_have_news();
        polled[0] = (struct pollfd){.fd = DSEC_CONTROL_FD, .events = (short)(POLLIN | (news ? POLLOUT : 0))};
        polled[1] = (struct pollfd){.fd = signal_fd, .events = POLLIN};
        int watched_sinks = commands_watch_sinks(polled + 2);
        if (poll(polled, (nfds_t)(2 + watched_sinks), commands_wait_ms()) < 0)
            continue;
        if (watched_sinks)
            commands_drain_sinks(polled + 2, watched_sinks);
        if (polled[1].revents) {
            struct signalfd_siginfo info[8];
            if (read(signal_fd, info, sizeof info) > 0)
                reap();
        }
        commands_look_at_held();
        if (polled[0].revents & POLLOUT)
            commands_tell(false);
        if (polled[0].revents & POLLIN) {
            reap(); /* what somebody outside knows to be dead, the next command does not find */
            handle_request();
        }
    }
}

/* Each command costs us a few descriptors; commands themselves get the usual limit. */
static void raise_descriptor_limit(void)
{
    struct rlimit raised;
    if (getrlimit(RLIMIT_NOFILE, &command_descriptor_limit) < 0)
        broken(STEP_RESOURCE_LIMITS);
    raised = command_descriptor_limit;
    if (raised.rlim_cur < DESCRIPTORS_WANTED)
        raised.rlim_cur = raised.rlim_max < DESCRIPTORS_WANTED ? raised.rlim_max : DESCRIPTORS_WANTED;
    if (setrlimit(RLIMIT_NOFILE, &raised) < 0)
        broken(STEP_RESOURCE_LIMITS);
}

int main(void)
{
    sigset_t children;
    struct control_reply ready = {.kind = CONTROL_READY};

    if (getpid() != 1)
        return 2;
    sys_close_range(DSEC_WRITABLE_FD + 1, ~0U, 0);
    for (int kept = DSEC_CONTROL_FD; kept <= DSEC_WRITABLE_FD; kept++)
        fcntl(kept, F_SETFD, FD_CLOEXEC);
    raise_descriptor_limit();
    if (confine() < 0)
        broken(STEP_LANDLOCK);
    size_t size = (DSEC_COMMANDS_MAX + FILES_MAX) * sizeof *outcomes;
    outcomes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (outcomes == MAP_FAILED)
        broken(STEP_MEMORY);
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    int signal_fd = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signal_fd < 0)
        broken(STEP_MEMORY);
    if (packet_send(DSEC_CONTROL_FD, &ready, sizeof ready, NULL, 0, 0) < 0)
        return 1;
    loop(signal_fd);
}
