/*
 * The sandbox's own host name, in its /etc/hosts: what asks for its own address (MPI, Java, torch) finds one without
 * a network. The rest of the file stays; the name of the sandbox that a snapshot was taken of goes.
 */
#include <linux/openat2.h>
#include <stdio.h>
#include <sys/stat.h>

#include "spawner.h"

#define HOSTS "/etc/hosts"
#define OURS "\t# this sandbox\n"
#define WITHOUT_ONE "127.0.0.1 localhost\n::1 localhost\n"
#define HOSTS_BYTES_MAX (64 << 10)

/* Layers are hostile: no link is followed, nothing but the sandbox's own files is reached, and a pipe holds nobody up. */
static int open_hosts(uint64_t flags)
{
    struct open_how how = {
        .flags = flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
        .mode = flags & O_CREAT ? 0644 : 0,
        .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV,
    };
    return (int)syscall(SYS_openat2, AT_FDCWD, HOSTS, &how, sizeof how);
}

/* Return the file's bytes in `text`, or a negative number for one that is better left alone. */
static ssize_t read_hosts(char *text, int may_create)
{
    struct stat status;
    ssize_t count = -1;
    int fd = open_hosts(O_RDONLY);

    if (fd < 0 && errno == ENOENT && may_create) {
        memcpy(text, WITHOUT_ONE, sizeof WITHOUT_ONE);
        return sizeof WITHOUT_ONE - 1;
    }
    if (fd < 0)
        return -1;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size < HOSTS_BYTES_MAX)
        count = read(fd, text, HOSTS_BYTES_MAX);
    close(fd);
    return count == HOSTS_BYTES_MAX ? -1 : count;
}

/* Drop the lines that are of our making; return what is left. */
static size_t without_ours(char *text, size_t length)
{
    const size_t mark = sizeof OURS - 1;
    size_t kept = 0;

    for (size_t at = 0, next; at < length; at = next) {
        char *newline = memchr(text + at, '\n', length - at);
        next = newline ? (size_t)(newline - text) + 1 : length;
        if (next - at > mark && !memcmp(text + next - mark, OURS, mark))
            continue;
        memmove(text + kept, text + at, next - at);
        kept += next - at;
    }
    return kept;
}

/*
 * One that a snapshot is without was deleted there, and stays deleted.
 * Where that cannot be, the name does not resolve, and nothing else is amiss.
 */
void name_in_hosts(const char *hostname, int may_create)
{
    static char text[HOSTS_BYTES_MAX + DSEC_HOSTNAME_MAX + 64];
    char own[DSEC_HOSTNAME_MAX + 64];
    ssize_t length = read_hosts(text, may_create);
    size_t size = (size_t)snprintf(own, sizeof own, "127.0.1.1 %s" OURS, hostname);

    if (length < 0 || ((size_t)length >= size && !memcmp(text + length - size, own, size)))
        return;
    length = (ssize_t)without_ours(text, (size_t)length);
    if (length && text[length - 1] != '\n')
        text[length++] = '\n';
    memcpy(text + length, own, size);
    int fd = open_hosts(O_WRONLY | O_TRUNC | (may_create ? O_CREAT : 0));
    if (fd < 0)
        return;
    if (write(fd, text, (size_t)length + size) < 0)
        (void)ftruncate(fd, 0);
    close(fd);
}
