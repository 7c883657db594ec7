// The device functions as a shared library: loops over arrays, nothing else. The tests call these with NumPy arrays.
#include "block/dequantize_block.cuh"
#include "block/finite_maximum.cuh"
#include "block/quantize_block.cuh"
#include "kernels/amax_arguments.cuh"
#include "kernels/dequantize_arguments.cuh"
#include "kernels/quantize_any_arguments.cuh"
#include "kernels/quantize_arguments.cuh"
#include "kernels/relayout_arguments.cuh"
#include "layout/scale_layout.cuh"

template <int TYPE>
void quantize_type(const u32* words, u64 blocks, float global_scale, u8* scale, u32* codes, int force_extreme) {
    for (u64 i = 0; i < blocks; ++i) {
        const u32* word = words + i * Elements<TYPE>::WORDS;
        const float t = scaled_maximum<TYPE>(word, global_scale);
        Codes found = {0u, 0u};
        if (is_ordinary(global_scale) && !force_extreme) {
            scale[i] = (u8)e4m3x2_from_floats(t, 0.0f);
            found = quantize_ordinary<TYPE>(word, scale[i], inverse_for_factors(global_scale));
        } else {
            scale[i] = (u8)quantize_extreme<TYPE>(word, t, global_scale, found);
        }
        codes[2 * i] = found.low;
        codes[2 * i + 1] = found.high;
    }
}

template <int TYPE>
float finite_maximum_of(const u32* words, u64 count) {
    FiniteMaximum<TYPE> largest;
    for (u64 i = 0; i + 4 <= count; i += 4) {
        const u32 four[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
        largest.add(four);
    }
    return largest.value();
}

extern "C" {

void encode_e4m3(const float* value, u8* byte, u64 count) {
    for (u64 i = 0; i < count; ++i) byte[i] = (u8)e4m3_from_float_portable(value[i]);
}

void decode_e4m3(const u8* byte, float* value, u64 count) {
    for (u64 i = 0; i < count; ++i) value[i] = float_from_e4m3_portable(byte[i]);
}

// Codes 0..15 of a (any float) in the way of the kernels.
void encode_e2m1(const float* a, u8* code, u64 count) {
    for (u64 i = 0; i < count; ++i) {
        const float rounded = round_to_e2m1(multiply_saturate(absolute(a[i]), UNIT));
        code[i] = (u8)(pair_of_codes(rounded, rounded, bits_of(a[i]) >> 16) >> 12 & 0xFu);
    }
}

// How many of the floats with bits first..last round to another code than by comparison; the first one's bits.
u64 count_wrong_e2m1(u32 first, u32 last, u32* example) {
    u64 wrong = 0;
    for (u64 bits = first; bits <= last; ++bits) {
        const float a = float_of((u32)bits), rounded = round_to_e2m1(multiply_saturate(a, UNIT));
        const u32 code = pair_of_codes(rounded, rounded, 0u) >> 12 & 0xFu;
        if (code != e2m1_magnitude_by_comparison(a) && wrong++ == 0) *example = (u32)bits;
    }
    return wrong;
}

void gather(const u32* pairs, u32* word, u64 count) {
    for (u64 i = 0; i < count; ++i) word[i] = gather_codes(pairs + 4 * i);
}

void quantize_blocks(int type, const u32* words, u64 blocks, float global_scale, u8* scale, u32* codes, int extreme) {
    if (type == FLOAT16) quantize_type<FLOAT16>(words, blocks, global_scale, scale, codes, extreme);
    if (type == BFLOAT16) quantize_type<BFLOAT16>(words, blocks, global_scale, scale, codes, extreme);
    if (type == FLOAT32) quantize_type<FLOAT32>(words, blocks, global_scale, scale, codes, extreme);
}

}  // extern "C"

template <int TYPE>
void dequantize_type(const u32* codes, const float* scale, float global_scale, u32* words, u64 count) {
    for (u64 i = 0; i < count; ++i) {
        if (is_ordinary(global_scale)) {
            dequantize_ordinary<TYPE>(codes[i], scale[i], OrdinaryDivider(global_scale * UNIT), words + 4 * i);
        } else {
            dequantize_extreme<TYPE>(codes[i], scale[i], global_scale, words + 4 * i);
        }
    }
}

extern "C" {
// Pieces of 16 bytes: four words each.
void dequantize_pieces(int type, const u32* codes, const float* scale, float global_scale, u32* words, u64 count) {
    if (type == FLOAT16) dequantize_type<FLOAT16>(codes, scale, global_scale, words, count);
    if (type == BFLOAT16) dequantize_type<BFLOAT16>(codes, scale, global_scale, words, count);
    if (type == FLOAT32) dequantize_type<FLOAT32>(codes, scale, global_scale, words, count);
}

// How many quotients of the eight e4m3 mantissas by every fp32 mantissa differ from the division's.
u64 count_wrong_quotients() {
    u64 wrong = 0;
    for (u32 mantissa = 0; mantissa < 1u << 23; ++mantissa) {
        const OrdinaryDivider divider(float_of(127u << 23 | mantissa));
        for (u32 s = 8; s < 16; ++s) {
            wrong += divider.quotient((float)s) != (float)s / divider.divisor;
        }
    }
    return wrong;
}

float finite_maximum(int type, const u32* words, u64 count) {
    return type == FLOAT16    ? finite_maximum_of<FLOAT16>(words, count)
           : type == BFLOAT16 ? finite_maximum_of<BFLOAT16>(words, count)
                              : finite_maximum_of<FLOAT32>(words, count);
}

void scale_offsets(u32 layout, const u64* row, const u64* column, u64 across, u64* offset, u64 count) {
    for (u64 i = 0; i < count; ++i) offset[i] = scale_offset(scale_layout(layout), row[i], column[i], across);
}

void scale_places(u32 layout, const u64* offset, u64 across, u64 magic, u64* row, u64* column, u64 count) {
    for (u64 i = 0; i < count; ++i) {
        const ScalePlace at = scale_place(scale_layout(layout), offset[i], across, magic);
        row[i] = at.row;
        column[i] = at.column;
    }
}

void divide_many(const u64* index, u64 magic, u64 divisor, u64* quotient, u64 count) {
    for (u64 i = 0; i < count; ++i) quotient[i] = divide(index[i], magic, divisor);
}

u64 argument_bytes(int which) {
    const u64 bytes[] = {sizeof(AmaxArguments), sizeof(DequantizeArguments), sizeof(QuantizeArguments),
                         sizeof(QuantizeAnyArguments), sizeof(RelayoutArguments)};
    return bytes[which];
}
}
