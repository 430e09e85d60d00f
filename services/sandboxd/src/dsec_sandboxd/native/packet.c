/* Packets with descriptors over a SOCK_SEQPACKET socket. */
#include "protocol.h"
#include "sys.h"

union control_buffer {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int) * DSEC_DESCRIPTORS_MAX)];
};

int packet_send(int socket_fd, const void *data, size_t size, const int *fds, int count, int flags)
{
    struct iovec vector = {(void *)data, size};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    union control_buffer control;

    if (count > 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)count);
    }
    ssize_t sent;
    do
        sent = sendmsg(socket_fd, &message, MSG_NOSIGNAL | flags);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -1 : 0;
}

ssize_t packet_receive(int socket_fd, void *data, size_t capacity, int *fds, int *count, int flags)
{
    struct iovec vector = {data, capacity};
    union control_buffer control;
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t received;

    *count = 0;
    do
        received = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC | flags);
    while (received < 0 && errno == EINTR);
    if (received < 0)
        return -1;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t number = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < number && *count < DSEC_DESCRIPTORS_MAX; i++)
            memcpy(&fds[(*count)++], CMSG_DATA(header) + i * sizeof(int), sizeof(int));
    }
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        for (int i = 0; i < *count; i++)
            close(fds[i]);
        *count = 0;
        /* The room for descriptors is what a sender may send: only a full table of ours cuts them short. */
        errno = message.msg_flags & MSG_TRUNC ? EMSGSIZE : EMFILE;
        return -1;
    }
    return received;
}
