// kernels_src/ptx/cache_policy.cuh on a CPU.
#pragma once
#include "../../host/ptx/cache_policy.cuh"
