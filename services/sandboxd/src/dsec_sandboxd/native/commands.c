/*
 * The table of commands: started, signalled, reaped, told of, and listed to a daemon that comes after the
 * one that started them. What a command's descriptors are is kept here until the daemon says that it has
 * read all (DONE), so that nothing is lost or broken off with the daemon.
 *
 * Most commands are brief and print little. The daemon has those held: it hears of one only when it has ended,
 * in one packet with all that it printed. One that lasts, or prints much, is handed over like any other.
 */
#include "pid1.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <time.h>

/* Held commands are looked at so often, and so many times at most. */
#define HELD_LOOK_MS 5
#define HELD_LOOKS_MAX 20
/* One that has printed so much may soon wait for somebody to read it: a pipe takes 65536. */
#define HELD_OUTPUT_MAX 16384

struct command {
    pid_t pid; /* 0: free */
    uint32_t id;
    uint32_t flags;
    uint32_t directory; /* the daemon's name for its cgroup */
    struct streams streams;
    bool held; /* the daemon has not been told that it runs */
    int looks;
    bool exited, told, done;
    int status;
};

static struct command commands[DSEC_COMMANDS_MAX];
static int top; /* no command at or beyond it: what was never used is never touched */
static int sinks[SINKS_MAX]; /* pipes of finished commands that something still writes to */
static int sink_count;
static bool untold; /* an exit could not be told yet: the socket was full */
static int listed = -1; /* how far a listing has come; -1: none is wanted */
static uint32_t listing_id;
static int held_count;
static int64_t held_due_ms; /* when held commands are looked at next */
static struct {
    struct control_reply reply;
    char output[DSEC_INLINE_OUTPUT_MAX];
} whole; /* the end of a held command, and what it printed */
static size_t whole_bytes; /* of it that could not be sent yet: the socket was full */

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static struct command *find_command(uint32_t id)
{
    for (int i = 0; i < top; i++)
        if (commands[i].pid && commands[i].id == id)
            return &commands[i];
    return NULL;
}

static void hold(struct command *command)
{
    command->held = true;
    if (!held_count++)
        held_due_ms = now_ms() + HELD_LOOK_MS;
}

static void unhold(struct command *command)
{
    held_count -= command->held;
    command->held = false;
}

static void shrink(void)
{
    while (top > 0 && !commands[top - 1].pid)
        top--;
}

/* ---- starting ---- */

static pid_t fork_command(const struct request_view *view, const struct streams *streams, int cgroup_fd,
                          struct outcome *outcome)
{
    struct clone_arguments arguments = {.exit_signal = SIGCHLD};
    if (cgroup_fd >= 0) {
        arguments.flags = CLONE_INTO_CGROUP;
        arguments.cgroup = (uint64_t)cgroup_fd;
    }
    *outcome = (struct outcome){0, 0};
    pid_t pid = (pid_t)sys_clone3(&arguments);
    if (pid == 0)
        command_child(view, streams->child, outcome);
    return pid;
}

static int started_descriptors(const struct streams *streams, int *fds)
{
    int count = 0;
    if (streams->input >= 0)
        fds[count++] = streams->input;
    fds[count++] = streams->output;
    if (streams->error >= 0)
        fds[count++] = streams->error;
    for (int i = 0; i < 2; i++)
        if (streams->relay[i] >= 0)
            fds[count++] = streams->relay[i];
    return count;
}

static int tell_started(const struct command *command, int flags)
{
    struct control_reply reply = {.kind = CONTROL_STARTED, .id = command->id, .status = command->pid};
    int fds[DSEC_DESCRIPTORS_MAX], count = started_descriptors(&command->streams, fds);
    return packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, fds, count, flags);
}

void commands_start(const struct request_view *view, int cgroup_fd, int spool_fd)
{
    const struct control_request *header = view->header;
    struct streams streams;
    enum dsec_step step = STEP_PIPES;
    int slot = 0;
    pid_t pid = -1;

    while (slot < top && commands[slot].pid)
        slot++;
    if (slot == DSEC_COMMANDS_MAX || find_command(header->id)) {
        tell_failure(CONTROL_FAILED, header->id, STEP_COMMAND_SLOT, slot == DSEC_COMMANDS_MAX ? EAGAIN : EEXIST);
        return;
    }
    if (streams_open(&streams, header, spool_fd, &step) == 0) {
        step = STEP_COMMAND_FORK;
        pid = fork_command(view, &streams, cgroup_fd, &outcomes[slot]);
    }
    if (pid < 0) {
        tell_failure(CONTROL_FAILED, header->id, step, errno);
        streams_close(&streams);
        return;
    }
    streams_close_child(&streams);
    bool held = header->flags & CONTROL_HOLD && !(header->flags & (CONTROL_WITH_STDIN | CONTROL_TERMINAL));
    struct command command = {.pid = pid, .id = header->id, .flags = header->flags,
                              .directory = header->directory, .streams = streams};
    if (!held && tell_started(&command, 0) < 0) {
        /* Nobody would ever read it or hear of it. */
        tell_failure(CONTROL_FAILED, header->id, STEP_PIPES, errno);
        kill(-pid, SIGKILL);
        kill(pid, SIGKILL);
        streams_close(&streams);
        return;
    }
    if (held)
        hold(&command);
    if (!(header->flags & CONTROL_KEEP_STDIN) && !(header->flags & CONTROL_TERMINAL)) {
        close_if_open(command.streams.input); /* the daemon has it, and its end is the input's end */
        command.streams.input = -1;
    }
    commands[slot] = command;
    if (slot == top)
        top++;
}

/* ---- held ones that last ---- */

/* How much waits in a command's pipes. */
static size_t printed(const struct command *command, int stream)
{
    int fd = stream == 0 ? command->streams.output : command->streams.error, size = 0;
    return fd >= 0 && ioctl(fd, FIONREAD, &size) == 0 && size > 0 ? (size_t)size : 0;
}

int commands_wait_ms(void)
{
    if (!held_count)
        return -1;
    int64_t left_ms = held_due_ms - now_ms();
    return left_ms > 0 ? (int)left_ms : 0;
}

void commands_look_at_held(void)
{
    if (commands_wait_ms() != 0)
        return;
    for (int i = 0; i < top; i++) {
        struct command *command = &commands[i];
        if (!command->pid || !command->held || command->exited)
            continue;
        bool lasts = ++command->looks >= HELD_LOOKS_MAX;
        bool prints = printed(command, 0) > HELD_OUTPUT_MAX || printed(command, 1) > HELD_OUTPUT_MAX;
        if ((lasts || prints) && tell_started(command, MSG_DONTWAIT) == 0) /* else at the next look */
            unhold(command);
    }
    held_due_ms = now_ms() + HELD_LOOK_MS;
}

/* ---- their pipes afterwards ---- */

/* Read and forget what waits in a pipe. Returns whether someone may still write to it. */
static bool discard(int fd)
{
    static char nowhere[65536];
    for (int turn = 0; turn < 16; turn++) {
        ssize_t size = read(fd, nowhere, sizeof nowhere);
        if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR))
            return false;
        if (size < 0)
            return true;
    }
    return true;
}

/* A process that a finished command left behind may go on writing: into nothing, without SIGPIPE. */
static void sink(int fd)
{
    if (fd < 0)
        return;
    if (sink_count < SINKS_MAX && discard(fd))
        sinks[sink_count++] = fd;
    else
        close(fd);
}

int commands_watch_sinks(struct pollfd *polled)
{
    for (int i = 0; i < sink_count; i++)
        polled[i] = (struct pollfd){.fd = sinks[i], .events = POLLIN};
    return sink_count;
}

void commands_drain_sinks(const struct pollfd *polled, int count)
{
    int kept = 0, all = sink_count;
    for (int i = 0; i < all; i++) {
        if (i < count && polled[i].revents && !discard(sinks[i]))
            close(sinks[i]);
        else
            sinks[kept++] = sinks[i];
    }
    sink_count = kept;
}

void commands_close_stdin(uint32_t id)
{
    struct command *command = find_command(id);
    if (!command || command->flags & CONTROL_TERMINAL)
        return;
    close_if_open(command->streams.input);
    close_if_open(command->streams.spool);
    command->streams.input = command->streams.spool = -1;
}

/* Nobody reads any more what it prints. */
static void let_go(struct command *command)
{
    if (!(command->flags & CONTROL_TERMINAL)) { /* a terminal's end is its processes' hang-up */
        sink(command->streams.output);
        sink(command->streams.error);
        command->streams.output = command->streams.error = -1;
    }
    streams_close(&command->streams);
    command->done = true;
    if (command->exited && command->told)
        command->pid = 0;
}

void commands_finish(uint32_t id)
{
    struct command *command = find_command(id);
    if (command)
        let_go(command);
    shrink();
}

/* ---- signals ---- */

/* Signal every process of a command's cgroup, as seen from here: pids cannot leave the sandbox. */
void commands_signal(const struct control_request *header, int cgroup_fd)
{
    char text[32768], *rest = text, *line;
    int number = (int)header->signal;
    struct command *command = find_command(header->id);
    pid_t spared = command && header->flags & CONTROL_SPARE_MAIN ? command->pid : -1;

    if (number < 1 || number > 64)
        return;
    if (header->flags & CONTROL_MAIN_ONLY) {
        if (command && !command->exited)
            kill(command->pid, number);
        return;
    }
    int fd = cgroup_fd < 0 ? -1 : openat(cgroup_fd, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    close_if_open(fd);
    if (size <= 0) {
        if (command && !command->exited && spared < 0)
            kill(-command->pid, number);
        return;
    }
    text[size] = 0;
    while ((line = strsep(&rest, "\n"))) {
        long pid = strtol(line, NULL, 10);
        if (pid > 1 && pid != spared)
            kill((pid_t)pid, number);
    }
}

/* ---- ends, and what a later daemon is told ---- */

bool commands_note_exit(pid_t pid, int status)
{
    for (int i = 0; i < top; i++) {
        if (commands[i].pid == pid && !commands[i].exited) {
            commands[i].exited = true;
            commands[i].status = status;
            return true;
        }
    }
    return false;
}

static int send_whole(void)
{
    if (whole_bytes && packet_send(DSEC_CONTROL_FD, &whole, whole_bytes, NULL, 0, MSG_DONTWAIT) < 0)
        return -1;
    whole_bytes = 0;
    return 0;
}

static uint32_t take_printed(int fd, size_t size, char *where)
{
    ssize_t taken = size ? read(fd, where, size) : 0;
    return taken > 0 ? (uint32_t)taken : 0;
}

/* Tell the end of a held command with all that it printed, and forget it. False if that is too much. */
static bool tell_whole(struct command *command, bool alone)
{
    size_t sizes[2] = {printed(command, 0), printed(command, 1)};
    if (sizes[0] + sizes[1] > sizeof whole.output)
        return false;
    whole.reply = (struct control_reply){.kind = CONTROL_EXITED, .id = command->id, .status = command->status,
                                         .file_mode = EXITED_WHOLE | (alone ? EXITED_ALONE : 0)};
    whole.reply.user_id = take_printed(command->streams.output, sizes[0], whole.output);
    whole.reply.group_id = take_printed(command->streams.error, sizes[1], whole.output + whole.reply.user_id);
    whole_bytes = sizeof whole.reply + whole.reply.user_id + whole.reply.group_id;
    command->told = true;
    unhold(command);
    let_go(command);
    return true;
}

/* Tell how a command ended, or why it never ran. False if the socket is full. */
static bool tell_exit(struct command *command, const struct outcome *outcome, bool alone)
{
    struct control_reply reply = {.kind = CONTROL_EXITED, .id = command->id, .status = command->status,
                                  .file_mode = alone ? EXITED_ALONE : 0};
    if (outcome->step) {
        reply.kind = CONTROL_FAILED;
        reply.step = (uint32_t)outcome->step;
        reply.error = outcome->error;
        command->done |= command->held; /* the daemon knows nothing of it */
        unhold(command);
    } else if (command->held) {
        if (tell_whole(command, alone))
            return send_whole() == 0;
        if (tell_started(command, MSG_DONTWAIT) < 0)
            return false;
        unhold(command);
    }
    if (packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, NULL, 0, MSG_DONTWAIT) < 0)
        return false;
    command->told = true;
    if (outcome->step) /* it never ran, so it left nothing in its pipes */
        streams_close(&command->streams);
    if (command->done)
        command->pid = 0;
    return true;
}

static void tell_exits(bool alone)
{
    untold = send_whole() < 0;
    for (int i = 0; i < top && !untold; i++)
        if (commands[i].pid && commands[i].exited && !commands[i].told)
            untold = !tell_exit(&commands[i], &outcomes[i], alone);
    shrink();
}

static void list_further(void)
{
    for (; listed < top; listed++) {
        struct command *command = &commands[listed];
        int fds[DSEC_DESCRIPTORS_MAX], count = 0;
        if (!command->pid)
            continue;
        struct control_reply reply = {.kind = CONTROL_LISTED, .id = command->id, .status = command->status,
                                      .user_id = command->directory, .group_id = (uint32_t)command->pid,
                                      .file_mode = command->exited ? LISTED_EXITED : 0};
        reply.file_mode |= command->flags & CONTROL_HOLD ? LISTED_HELD : 0;
        if (command->exited && outcomes[listed].step) {
            reply.step = (uint32_t)outcomes[listed].step;
            reply.error = outcomes[listed].error;
        }
        if (command->streams.output >= 0) {
            reply.file_mode |= LISTED_WITH_STREAMS;
            reply.file_mode |= command->streams.input >= 0 ? LISTED_WITH_STDIN : 0;
            reply.file_mode |= command->streams.spool >= 0 ? LISTED_WITH_SPOOL : 0;
            reply.file_mode |= command->flags & CONTROL_TERMINAL ? LISTED_TERMINAL : 0;
            count = started_descriptors(&command->streams, fds);
            if (command->streams.spool >= 0)
                fds[count++] = command->streams.spool;
        }
        if (packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, fds, count, MSG_DONTWAIT) < 0)
            return;
    }
    struct control_reply reply = {.kind = CONTROL_LIST_ENDED, .id = listing_id};
    if (packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, NULL, 0, MSG_DONTWAIT) == 0)
        listed = -1;
}

void commands_list(uint32_t id)
{
    for (int i = 0; i < top; i++)
        unhold(&commands[i]); /* whoever lists gets its descriptors with the list */
    listing_id = id;
    listed = 0;
    list_further();
}

bool commands_have_news(void)
{
    return untold || listed >= 0;
}

void commands_tell(bool alone)
{
    tell_exits(alone);
    if (!untold && listed >= 0)
        list_further();
}
