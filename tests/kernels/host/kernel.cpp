// One kernel as a function of the host. -DSOURCE="kernels/x.cu" -DENTRY=x -DARGUMENTS=XArguments, and its own macros.
#include "grid.h"
#include SOURCE

extern "C" void run(u32 x, u32 y, u32 z, u32 threads, const ARGUMENTS* arguments) {
    run_grid(ENTRY, *arguments, {x, y, z}, threads);
}
