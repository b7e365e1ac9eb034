// Connects the host code of one library of kernels to the scheduler. Included after the kernels; expects
// `sim_kernels`, a table of sim::Kernel that ends with a null name.
#pragma once

namespace sim {

inline const Kernel kSetDevice{"__tvm_set_device", nullptr, "", 0};

inline LaunchSize launch_size(const Kernel& kernel, const TVMFFIAny* arguments, int count) {
  LaunchSize size{{1, 1, 1}, {1, 1, 1}, 0};
  int i = kernel.num_arguments;
  for (const char* tag = kernel.launch_tags; *tag && i < count; tag++, i++) {
    long value = arguments[i].v_int64;
    if (*tag >= '0' && *tag <= '2') size.grid[*tag - '0'] = value;
    if (*tag >= '3' && *tag <= '5') size.block[*tag - '3'] = value;
    if (*tag == 's') size.dynamic_shared = value;
  }
  return size;
}

}  // namespace sim

extern "C" __attribute__((visibility("hidden"))) int sim_find(void*, const char* name, void** function) {
  for (const sim::Kernel* kernel = sim_kernels; kernel->name; kernel++)
    if (strcmp(kernel->name, name) == 0) return *function = const_cast<sim::Kernel*>(kernel), 0;
  if (strcmp(name, sim::kSetDevice.name) == 0) return *function = const_cast<sim::Kernel*>(&sim::kSetDevice), 0;
  sim_set_error("SimulationError", (std::string("the host code asks for an unknown function ") + name).c_str());
  return -1;
}

extern "C" __attribute__((visibility("hidden"))) int sim_call(void* function, TVMFFIAny* arguments, int count,
                                                              TVMFFIAny*) {
  const sim::Kernel& kernel = *static_cast<const sim::Kernel*>(function);
  return kernel.body ? sim::launch(kernel, sim::launch_size(kernel, arguments, count), arguments) : 0;
}
