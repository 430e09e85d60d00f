/* What a command reads and writes: pipes, or a terminal of the sandbox's own. */
#include "pid1.h"

#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <termios.h>

#define TERMINAL_MULTIPLEXER_MAJOR 5
#define TERMINAL_MULTIPLEXER_MINOR 2

void streams_close_child(struct streams *streams)
{
    /* Output and error may be the same, and so may all three. */
    for (int i = 0; i < 3; i++) {
        bool again = (i > 0 && streams->child[i] == streams->child[0]) || (i == 2 && streams->child[2] == streams->child[1]);
        if (!again)
            close_if_open(streams->child[i]);
    }
    streams->child[0] = streams->child[1] = streams->child[2] = -1;
}

void streams_close(struct streams *streams)
{
    int *ours[] = {&streams->input, &streams->output, &streams->error, &streams->spool, &streams->relay[0],
                   &streams->relay[1]};
    streams_close_child(streams);
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        close_if_open(*ours[i]);
        *ours[i] = -1;
    }
}

static int open_pipe(int *reading, int *writing, int nonblocking_end)
{
    int pair[2];
    if (pipe2(pair, O_CLOEXEC) < 0)
        return -1;
    *reading = pair[0];
    *writing = pair[1];
    return fcntl(pair[nonblocking_end], F_SETFL, O_NONBLOCK);
}

/*
 * The multiplexer of our own devpts, and nothing that only looks like it. None of this can make it a
 * controlling terminal of ours. What is printed goes through a pipe that we keep: taken out of the terminal
 * but not yet out of the pipe, it survives the daemon.
 */
static int open_terminal(struct streams *streams, const struct control_request *header)
{
    struct winsize size = {.ws_row = (unsigned short)(header->mode >> 16), .ws_col = (unsigned short)header->mode};
    struct statfs file_system;
    struct stat status;
    int unlocked = 0;

    streams->output = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    if (streams->output < 0)
        return -1;
    if (fstat(streams->output, &status) < 0 || fstatfs(streams->output, &file_system) < 0)
        return -1;
    if (!S_ISCHR(status.st_mode) || file_system.f_type != DEVPTS_SUPER_MAGIC ||
        status.st_rdev != makedev(TERMINAL_MULTIPLEXER_MAJOR, TERMINAL_MULTIPLEXER_MINOR)) {
        errno = ENOTTY;
        return -1;
    }
    if (ioctl(streams->output, TIOCSPTLCK, &unlocked) < 0 || ioctl(streams->output, TIOCSWINSZ, &size) < 0)
        return -1;
    int peer = ioctl(streams->output, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (peer < 0)
        return -1;
    streams->child[0] = streams->child[1] = streams->child[2] = peer;
    return pipe2(streams->relay, O_CLOEXEC | O_NONBLOCK);
}

static int open_pipes(struct streams *streams, const struct control_request *header)
{
    if (header->flags & CONTROL_WITH_STDIN) {
        if (open_pipe(&streams->child[0], &streams->input, 1) < 0)
            return -1;
    } else {
        streams->child[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (streams->child[0] < 0)
            return -1;
    }
    if (open_pipe(&streams->output, &streams->child[1], 0) < 0)
        return -1;
    if (header->flags & CONTROL_MERGE_STDERR) {
        streams->child[2] = streams->child[1];
        return 0;
    }
    return open_pipe(&streams->error, &streams->child[2], 0);
}

int streams_open(struct streams *streams, const struct control_request *header, int spool_fd, enum dsec_step *step)
{
    *streams = (struct streams){.child = {-1, -1, -1}, .input = -1, .output = -1, .error = -1, .spool = -1,
                                .relay = {-1, -1}};
    if (spool_fd >= 0 && header->flags & CONTROL_KEEP_STDIN) {
        streams->spool = fcntl(spool_fd, F_DUPFD_CLOEXEC, 0);
        if (streams->spool < 0)
            return -1;
    }
    if (!(header->flags & CONTROL_TERMINAL))
        return open_pipes(streams, header);
    *step = STEP_COMMAND_TERMINAL;
    return open_terminal(streams, header);
}
