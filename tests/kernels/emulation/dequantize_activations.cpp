// kernels/dequantize_activations.cu as a function of the host: runs its blocks one after the other.
#include "block.h"
#include "kernels/dequantize_activations.cu"

extern "C" void run(u32 rows, u32 spans, const DequantizeActivationsArguments* args) {
    for (blockIdx.y = 0; blockIdx.y < spans; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < rows; ++blockIdx.x) {
            emulation::run_block(THREADS, [args] { dequantize_activations(*args); });
        }
    }
}
