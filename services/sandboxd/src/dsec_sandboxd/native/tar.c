/* Reading a tar header. */
#include "tar.h"

int64_t tar_number(const char *text, size_t size)
{
    int64_t value = 0;
    if ((unsigned char)text[0] & 0x80) {
        value = text[0] & 0x40 ? -1 : 0;
        value = (int64_t)((uint64_t)value << 6) | (text[0] & 0x3f);
        for (size_t i = 1; i < size; i++)
            value = (int64_t)((uint64_t)value << 8) | (unsigned char)text[i];
        return value;
    }
    for (size_t i = 0; i < size && text[i]; i++)
        if (text[i] >= '0' && text[i] <= '7')
            value = value * 8 + (text[i] - '0');
    return value;
}

bool tar_checksum_fits(const struct tar_header *header)
{
    const unsigned char *bytes = (const unsigned char *)header;
    int64_t sum = 0;
    for (size_t i = 0; i < TAR_BLOCK; i++) {
        bool own = i >= offsetof(struct tar_header, checksum) &&
                   i < offsetof(struct tar_header, checksum) + sizeof header->checksum;
        sum += own ? ' ' : bytes[i];
    }
    return sum == tar_number(header->checksum, sizeof header->checksum);
}
