// Page codecs. A page has 4096 bytes, that is 512 words of 64 bits; the formats are little-endian, as the device is.

#define PAGE 4096
#define WORDS 512
// Words that one word of a map is for, and how many of those a page has.
#define GROUP 64
#define GROUPS 8

// XXH3 of 64 bits (xxHash's specification, "long" inputs with the default secret), and whether a page is
// zero. Eight items work on a page, each on one of the eight accumulators.

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ul
#define PRIME64_2 0xC2B2AE3D27D4EB4Ful
#define PRIME64_3 0x165667B19E3779F9ul
#define PRIME64_4 0x85EBCA77C2B2AE63ul
#define PRIME64_5 0x27D4EB2F165667C5ul
#define SECRET 192
#define STRIPE 64
// Stripes until the accumulators are scrambled: the secret moves on by 8 bytes at each.
#define STRIPES_A_BLOCK 16

__constant uchar secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static ulong secret_at(uint at) {
    ulong word = 0;
    for (uint byte = 0; byte < 8; byte++) word |= (ulong)secret[at + byte] << (8 * byte);
    return word;
}

static ulong accumulate(ulong sum, ulong ours, ulong neighbours, ulong key) {
    ulong mixed = ours ^ key;
    return sum + neighbours + (mixed & 0xFFFFFFFFul) * (mixed >> 32);
}

static ulong fold(ulong one, ulong other) { return (one * other) ^ mul_hi(one, other); }

__kernel void look(__global const ulong *pages, uint count, __global ulong *hashes, __global uchar *zeros) {
    __local ulong sums[64];
    __local ulong ors[64];
    uint local_id = get_local_id(0), lane = local_id % 8, page = get_global_id(0) / 8;
    bool is_there = page < count;
    // A page that is not there is the last one once more, so that all items meet at the barrier.
    __global const ulong *words = pages + (ulong)(is_there ? page : count - 1) * WORDS;
    const ulong begin[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    ulong sum = begin[lane], all = 0;
    // The last stripe comes by itself, with another part of the secret.
    for (uint stripe = 0; stripe < PAGE / STRIPE - 1; stripe++) {
        ulong ours = words[stripe * 8 + lane], neighbours = words[stripe * 8 + (lane ^ 1)];
        all |= ours;
        uint in_block = stripe % STRIPES_A_BLOCK;
        sum = accumulate(sum, ours, neighbours, secret_at(in_block * 8 + lane * 8));
        if (in_block == STRIPES_A_BLOCK - 1) {
            ulong key = secret_at(SECRET - STRIPE + lane * 8);
            sum = ((sum ^ (sum >> 47)) ^ key) * PRIME32_1;
        }
    }
    ulong ours = words[WORDS - 8 + lane];
    all |= ours;
    sum = accumulate(sum, ours, words[WORDS - 8 + (lane ^ 1)], secret_at(SECRET - STRIPE - 7 + lane * 8));
    sums[local_id] = sum;
    ors[local_id] = all;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane != 0 || !is_there) return;
    ulong hash = (ulong)PAGE * PRIME64_1;
    for (uint pair = 0; pair < 4; pair++) {
        ulong one = sums[local_id + 2 * pair] ^ secret_at(11 + 16 * pair);
        ulong other = sums[local_id + 2 * pair + 1] ^ secret_at(11 + 16 * pair + 8);
        hash += fold(one, other);
    }
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9ul;
    hashes[page] = hash ^ (hash >> 32);
    ulong bits = 0;
    for (uint index = 0; index < 8; index++) bits |= ors[local_id + index];
    zeros[page] = bits == 0;
}

// A page as the words in which it differs from `present`, or from the word before. 64 items work on a page,
// each on one word of each group. `maps` has two halves of 32 bits for each word of a page's map.

__kernel void measure_words(__global const ulong *pages, __global const ulong *present, uint is_delta, uint most,
                            __global uint *maps, __global uint *sizes) {
    __local uint map[2 * GROUPS];
    uint item = get_local_id(0);
    ulong page = get_group_id(0);
    __global const ulong *words = pages + page * WORDS;
    if (item < 2 * GROUPS) map[item] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint group = 0; group < GROUPS; group++) {
        uint index = group * GROUP + item;
        ulong base = is_delta ? present[page * WORDS + index] : index == 0 ? 0 : words[index - 1];
        if (words[index] != base) atomic_or(&map[2 * group + item / 32], 1u << (item % 32));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item < 2 * GROUPS) maps[page * 2 * GROUPS + item] = map[item];
    if (item != 0) return;
    uint bytes = 1;
    for (uint group = 0; group < GROUPS; group++) {
        uint differ = popcount(map[2 * group]) + popcount(map[2 * group + 1]);
        bytes += differ == 0 ? 0 : 8 + 8 * differ;
    }
    sizes[page] = bytes > most ? 0 : bytes;
}

__kernel void write_words(__global const ulong *pages, __global const uint *maps, __global const uint *starts,
                          __global uchar *bytes) {
    ulong page = get_group_id(0);
    uint item = get_local_id(0), start = starts[page];
    if (starts[page + 1] == start) return;
    __global const uint *map = maps + page * 2 * GROUPS;
    uint summary = 0;
    for (uint group = 0; group < GROUPS; group++)
        summary |= (uint)((map[2 * group] | map[2 * group + 1]) != 0) << group;
    __global uchar *of_maps = bytes + start + 1;
    __global uchar *of_words = of_maps + 8 * popcount(summary);
    if (item == 0) bytes[start] = summary;
    uint before = 0;
    for (uint group = 0; group < GROUPS; group++) {
        ulong bits = (ulong)map[2 * group] | (ulong)map[2 * group + 1] << 32;
        if (bits == 0) continue;
        if (item == 0) {
            vstore8(as_uchar8(bits), 0, of_maps);
        }
        of_maps += 8;
        if ((bits >> item) & 1) {
            uint place = before + (uint)popcount(bits & (((ulong)1 << item) - 1));
            vstore8(as_uchar8(pages[page * WORDS + group * GROUP + item]), 0, of_words + 8 * place);
        }
        before += (uint)popcount(bits);
    }
}

// Where what is left of each page begins: `starts` has one more than there are pages. One work-group of 256.

__kernel void place(__global const uint *sizes, uint count, __global uint *starts) {
    __local uint sums[256];
    uint item = get_local_id(0), each = (count + 255) / 256;
    uint first = min(item * each, count), last = min(first + each, count), sum = 0;
    for (uint page = first; page < last; page++) sum += sizes[page];
    sums[item] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    uint start = 0;
    for (uint index = 0; index < item; index++) start += sums[index];
    for (uint page = first; page < last; page++) {
        starts[page] = start;
        start += sizes[page];
    }
    if (item == 255) starts[count] = start;
}

// LZ4's block format (lz4_Block_format.md): one page a block. Greedy: the last place of four bytes with the same hash is the
// match. 32 items copy four pages to local memory, where each page's table is, too; then four of them work on a page each: what
// they read again and again is near, and few pages are under way at once.

#define TABLE_BITS 10
#define NOWHERE 0xFFFF
// No match begins in the last 12 bytes, and none goes on into the last 5.
#define LAST_BEGIN (PAGE - 12)
#define LAST_END (PAGE - 5)

#define TOGETHER 4
#define ITEMS_A_PAGE 8
// Halves of the words of a page, and of its table's entries in pairs.
#define HALVES (PAGE / 4)
#define PAIRS (1 << (TABLE_BITS - 1))

// Four bytes of a page of halves, wherever they begin; not the last three.
static uint four_at(__local const uint *page, uint at) {
    uint index = at / 4, bits = at % 4 * 8;
    ulong both = (ulong)page[index] | (ulong)page[min(index + 1, (uint)HALVES - 1)] << 32;
    return (uint)(both >> bits);
}

static uint byte_at(__local const uint *page, uint at) { return page[at / 4] >> (at % 4 * 8) & 0xFF; }

// How many bytes are equal from two places on, up to LAST_END.
static uint equal_bytes(__local const uint *page, uint at, uint found) {
    uint count = 0;
    while (at + count + 4 <= LAST_END) {
        uint differ = four_at(page, at + count) ^ four_at(page, found + count);
        if (differ != 0) return count + (differ & 0xFF ? 0 : differ & 0xFFFF ? 1 : differ & 0xFFFFFF ? 2 : 3);
        count += 4;
    }
    while (at + count < LAST_END && byte_at(page, at + count) == byte_at(page, found + count)) count++;
    return count;
}

// A length that its half of the token has no room for.
static uint write_length(__global uchar *out, uint at, uint left) {
    for (; left >= 255; left -= 255) out[at++] = 255;
    out[at++] = left;
    return at;
}

// A token and the literals from `from` on, where there is room for them and what may follow; else 0.
static uint write_literals(__global uchar *out, uint at, uint most, __local const uint *page, uint from, uint count,
                           uint match) {
    if (at + count + count / 255 + 2 + match / 255 + 4 > most) return 0;
    uint extra = match < 4 ? 0 : min(match - 4, 15u);
    out[at++] = min(count, 15u) << 4 | extra;
    if (count >= 15) at = write_length(out, at, count - 15);
    for (uint byte = 0; byte < count; byte++) out[at++] = byte_at(page, from + byte);
    return at;
}

// The bytes that a page takes as a block, which is written; 0 where it would be more than `most`.
static uint compress(__local const uint *page, __local ushort *table, uint most, __global uchar *out) {
    uint at = 0, anchor = 0, end = 0;
    while (at <= LAST_BEGIN) {
        uint four = four_at(page, at), slot = (four * 2654435761u) >> (32 - TABLE_BITS), found = table[slot];
        table[slot] = at;
        if (found == NOWHERE || four_at(page, found) != four) {
            // Where nothing matches for long, it is looked less often.
            at += 1 + ((at - anchor) >> 6);
            continue;
        }
        uint match = 4 + equal_bytes(page, at + 4, found + 4);
        end = write_literals(out, end, most, page, anchor, at - anchor, match);
        if (end == 0) return 0;
        vstore2(as_uchar2((ushort)(at - found)), 0, out + end);
        end += 2;
        if (match - 4 >= 15) end = write_length(out, end, match - 4 - 15);
        at += match;
        anchor = at;
    }
    return write_literals(out, end, most, page, anchor, PAGE - anchor, 0);
}

// In groups of TOGETHER * ITEMS_A_PAGE items.
__kernel void lz4(__global const uint *pages, uint count, uint most, __global uchar *room, __global uint *sizes) {
    __local uint copies[TOGETHER][HALVES];
    __local uint tables[TOGETHER][PAIRS];
    uint item = get_local_id(0), first = get_group_id(0) * TOGETHER, there = min((uint)TOGETHER, count - first);
    for (uint own = 0; own < there; own++) {
        __global const uint *from = pages + (ulong)(first + own) * HALVES;
        for (uint index = item; index < HALVES; index += TOGETHER * ITEMS_A_PAGE) copies[own][index] = from[index];
        for (uint pair = item; pair < PAIRS; pair += TOGETHER * ITEMS_A_PAGE)
            tables[own][pair] = NOWHERE | (uint)NOWHERE << 16;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    uint own = item / ITEMS_A_PAGE, page = first + own;
    if (item % ITEMS_A_PAGE != 0 || own >= there) return;
    sizes[page] = compress(copies[own], (__local ushort *)tables[own], most, room + (ulong)page * PAGE);
}

__kernel void write_blocks(__global const uchar *room, __global const uint *starts, __global uchar *bytes) {
    ulong page = get_group_id(0);
    uint start = starts[page], size = starts[page + 1] - start;
    for (uint byte = get_local_id(0); byte < size; byte += get_local_size(0)) bytes[start + byte] = room[page * PAGE + byte];
}
