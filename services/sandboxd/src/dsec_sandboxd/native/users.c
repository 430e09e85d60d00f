/*
 * Users of a sandbox. Its /etc/passwd and /etc/group belong to whoever owns the sandbox, so they are read
 * in the forked child, as plain data of bounded size: no name service, no libraries.
 */
#include "pid1.h"

#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define DATABASE_BYTES_MAX (1 << 20)

static char *read_database(const char *path)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    char *text = NULL;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size <= DATABASE_BYTES_MAX)
        text = calloc(1, (size_t)status.st_size + 1);
    if (text) {
        ssize_t size = read(fd, text, (size_t)status.st_size);
        text[size < 0 ? 0 : size] = 0;
    }
    close(fd);
    return text;
}

/* A decimal id below 65536; returns -1 for anything else. */
static long parse_id(const char *text)
{
    char *end;
    if (*text < '0' || *text > '9')
        return -1;
    unsigned long value = strtoul(text, &end, 10);
    return *end || value >= 65536 ? -1 : (long)value;
}

/* Find the account whose name or number is wanted; fills number, group and home. */
static bool find_account(const char *name, long number, struct identity *identity, char *found, size_t found_size)
{
    char *text = read_database("/etc/passwd"), *rest = text, *line;
    bool hit = false;

    while (text && !hit && (line = strsep(&rest, "\n"))) {
        char *fields[7] = {0};
        for (int i = 0; i < 7 && line; i++)
            fields[i] = strsep(&line, ":");
        if (!fields[5])
            continue;
        long user_id = parse_id(fields[2]), group_id = parse_id(fields[3]);
        if (user_id < 0 || group_id < 0 || (name ? strcmp(name, fields[0]) != 0 : user_id != number))
            continue;
        identity->user_id = (uint32_t)user_id;
        identity->group_id = (uint32_t)group_id;
        snprintf(identity->home, sizeof identity->home, "%s", fields[5]);
        snprintf(found, found_size, "%s", fields[0]);
        hit = true;
    }
    free(text);
    return hit;
}

static void add_group(struct identity *identity, uint32_t group_id)
{
    if (identity->group_count < (int)(sizeof identity->groups / sizeof *identity->groups))
        identity->groups[identity->group_count++] = group_id;
}

static void find_groups(const char *name, struct identity *identity)
{
    char *text = read_database("/etc/group"), *rest = text, *line;

    while (text && (line = strsep(&rest, "\n"))) {
        char *fields[4] = {0}, *member;
        for (int i = 0; i < 4 && line; i++)
            fields[i] = strsep(&line, ":");
        long group_id = fields[3] ? parse_id(fields[2]) : -1;
        if (group_id < 0)
            continue;
        while ((member = strsep(&fields[3], ",")))
            if (strcmp(member, name) == 0)
                add_group(identity, (uint32_t)group_id);
    }
    free(text);
}

int resolve_user(const char *user, struct identity *identity)
{
    char text[256], name[64] = "";
    char *group = NULL;

    memset(identity, 0, sizeof *identity);
    strcpy(identity->home, "/");
    if (!*user || strlen(user) >= sizeof text)
        return EINVAL;
    strcpy(text, user);
    long number = parse_id(text);
    if (number < 0 && (group = strchr(text, ':'))) {
        *group++ = 0;
        number = parse_id(text);
        long group_id = parse_id(group);
        if (number < 0 || group_id < 0)
            return EINVAL;
        find_account(NULL, number, identity, name, sizeof name);
        identity->user_id = (uint32_t)number;
        identity->group_id = (uint32_t)group_id;
        return 0;
    }
    if (number == 0 && !find_account(NULL, 0, identity, name, sizeof name))
        strcpy(identity->home, "/root");
    else if (number > 0 && !find_account(NULL, number, identity, name, sizeof name))
        identity->user_id = (uint32_t)number;
    else if (number < 0 && !find_account(text, -1, identity, name, sizeof name))
        return ENOENT;
    if (*name)
        find_groups(name, identity);
    return 0;
}

int assume_identity(const struct identity *identity)
{
    gid_t groups[64];
    for (int i = 0; i < identity->group_count; i++)
        groups[i] = identity->groups[i];
    if (setgroups((size_t)identity->group_count, groups) < 0 ||
        setresgid(identity->group_id, identity->group_id, identity->group_id) < 0 ||
        setresuid(identity->user_id, identity->user_id, identity->user_id) < 0)
        return errno;
    return 0;
}
