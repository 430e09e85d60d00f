/* Operations that go on after their answer: a socket to the daemon, and frames on it. */
#include "file_work.h"

#include <sys/uio.h>

int file_answer_stream(const struct request_view *request, enum dsec_step step, int second_fd,
                       struct outcome *outcome)
{
    struct control_reply reply = {.kind = CONTROL_FILE_DONE, .id = request->header->id};
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        file_refuse(request, step, errno, outcome);
    int fds[2] = {pair[0], second_fd};
    if (packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, fds, second_fd >= 0 ? 2 : 1, 0) < 0)
        _exit(0);
    outcome->step = STEP_COUNT; /* answered */
    close(pair[0]);
    /* Only the stream is of use from here on; the control socket is not ours to keep. */
    close(DSEC_CONTROL_FD);
    return pair[1];
}

static void send_all(int stream_fd, struct iovec *parts, int count)
{
    while (count > 0) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t sent = sendmsg(stream_fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            _exit(0); /* the daemon let go of it */
        while (count > 0 && (size_t)sent >= parts->iov_len) {
            sent -= (ssize_t)parts->iov_len;
            parts++;
            count--;
        }
        if (count > 0) {
            parts->iov_base = (char *)parts->iov_base + sent;
            parts->iov_len -= (size_t)sent;
        }
    }
}

void stream_frame(int stream_fd, const void *header, size_t header_size, const void *data, size_t size)
{
    uint32_t length = (uint32_t)(header_size + size);
    struct iovec parts[3] = {{&length, sizeof length}, {(void *)header, header_size}, {(void *)data, size}};
    send_all(stream_fd, parts, 3);
}

_Noreturn void stream_finish(int stream_fd, struct file_result result, const char *path)
{
    size_t size = path ? strnlen(path, 4096) : 0;
    uint32_t length = (uint32_t)(sizeof result + size) | DSEC_FRAME_RESULT;
    struct iovec parts[3] = {{&length, sizeof length}, {&result, sizeof result}, {(void *)path, size}};
    send_all(stream_fd, parts, 3);
    _exit(0);
}

int stream_read(int stream_fd, void *data, size_t size)
{
    size_t done = 0;
    while (done < size) {
        ssize_t got = read(stream_fd, (char *)data + done, size - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return done == 0 ? 0 : -1;
        done += (size_t)got;
    }
    return 1;
}
