// Settings of the sanitizers that every fuzz target is linked with: an allocation beyond the limit
// fails as on a machine without the memory, instead of ending the process.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1:max_allocation_size_mb=512:quarantine_size_mb=32";
}
