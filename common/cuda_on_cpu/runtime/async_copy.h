// cp.async: copies that land later.
#pragma once

namespace cuda_on_cpu {

struct Fiber;

/// Lets the copies of all groups but the newest `pending` land; with `all`, uncommitted ones too.
void land_copies(Fiber& thread, unsigned pending, bool all);

}  // namespace cuda_on_cpu
