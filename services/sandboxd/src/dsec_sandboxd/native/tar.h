/* The header block of a tar archive (POSIX ustar and GNU). */
#ifndef DSEC_TAR_H
#define DSEC_TAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TAR_BLOCK 512

struct tar_header {
    char name[100];
    char mode[8];
    char user_id[8];
    char group_id[8];
    char size[12];
    char modified[12];
    char checksum[8];
    char kind;
    char link[100];
    char magic[8]; /* "ustar\0" "00" of POSIX, "ustar  \0" of GNU */
    char user[32];
    char group[32];
    char major[8];
    char minor[8];
    char prefix[155];
    char padding[12];
};

_Static_assert(sizeof(struct tar_header) == TAR_BLOCK, "a header is one block");

/* A number of a header: octal, or base 256 with the first bit set. */
int64_t tar_number(const char *text, size_t size);
bool tar_checksum_fits(const struct tar_header *header);

#endif
