// What kernels.cl uses of OpenCL C, for a compiler that makes PTX and has no library of it (scripts/make-ptx.sh).

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef uchar uchar2 __attribute__((ext_vector_type(2)));
typedef uchar uchar8 __attribute__((ext_vector_type(8)));

// One dimension is enough.
#define get_local_id(dimension) ((uint)__nvvm_read_ptx_sreg_tid_x())
#define get_group_id(dimension) ((uint)__nvvm_read_ptx_sreg_ctaid_x())
#define get_local_size(dimension) ((uint)__nvvm_read_ptx_sreg_ntid_x())
#define get_global_id(dimension) (get_group_id(0) * get_local_size(0) + get_local_id(0))

#define CLK_LOCAL_MEM_FENCE 1
#define barrier(fence) __nvvm_bar_sync(0)

#define popcount(bits) _Generic((bits), ulong: __builtin_popcountl(bits), default: __builtin_popcount(bits))
#define as_uchar2(value) __builtin_astype(value, uchar2)
#define as_uchar8(value) __builtin_astype(value, uchar8)

static uint min(uint one, uint other) { return one < other ? one : other; }

static ulong mul_hi(ulong one, ulong other) {
    ulong high;
    __asm__("mul.hi.u64 %0, %1, %2;" : "=l"(high) : "l"(one), "l"(other));
    return high;
}

static void atomic_or(__local uint *at, uint bits) {
    uint before;
    __asm__ volatile("atom.shared.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(bits) : "memory");
}

static void vstore2(uchar2 bytes, ulong index, __global uchar *at) {
    at += 2 * index;
    at[0] = bytes.x;
    at[1] = bytes.y;
}

static void vstore8(uchar8 bytes, ulong index, __global uchar *at) {
    at += 8 * index;
    at[0] = bytes.s0;
    at[1] = bytes.s1;
    at[2] = bytes.s2;
    at[3] = bytes.s3;
    at[4] = bytes.s4;
    at[5] = bytes.s5;
    at[6] = bytes.s6;
    at[7] = bytes.s7;
}
