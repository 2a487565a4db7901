// A simulated accelerator, for tests: a PrivateUse1 device whose memory is the host's and whose kernels are the CPU's.
//
// What a real one refuses it refuses too: operands on another device, generators of the host, and more memory than it
// has. Every kernel that PyTorch has not composed of others runs through one boxed fallback: it hands the CPU's kernel
// views of the same memory, so nothing is copied and the bits are the CPU's.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_set>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int64_t kMemory = int64_t{1} << 30;  // that a device seems to have

thread_local DeviceIndex current = 0;

// Who uses how much of each device. Processes that share a device share a table, in a file that the environment names;
// what a process has used is free again when it is gone.
struct Slot {
  std::atomic<int> pid;
  std::atomic<int64_t> used[kDevices];
};
struct Table {
  std::atomic<int64_t> limit[kDevices];  // 0: none
  Slot slots[64];
};

Table& table() {
  static Table* made = [] {
    const char* path = std::getenv("FEDQUILT_SIMULATED_MEMORY");
    if (path == nullptr) return new Table();
    const int file = open(path, O_RDWR | O_CREAT, 0600);
    TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(Table)) == 0, "cannot share memory in ", path);
    return static_cast<Table*>(mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  }();
  return *made;
}

bool is_gone(int pid) { return pid != 0 && pid != getpid() && kill(pid, 0) != 0; }

Slot& own_slot() {
  static Slot* own = nullptr;
  if (own != nullptr && own->pid == getpid()) return *own;
  for (Slot& slot : table().slots) {
    int holder = slot.pid;
    if ((holder == 0 || is_gone(holder)) && slot.pid.compare_exchange_strong(holder, getpid())) {
      for (auto& used : slot.used) used = 0;
      return *(own = &slot);
    }
  }
  TORCH_CHECK(false, "too many processes share the device");
}

int64_t used_by_all(DeviceIndex device) {
  int64_t total = 0;
  for (Slot& slot : table().slots)
    if (slot.pid != 0 && !is_gone(slot.pid)) total += slot.used[device];
  return total;
}

std::array<std::atomic<int64_t>, kDevices> peak{};

void take(DeviceIndex device, int64_t bytes) {
  auto& used = own_slot().used[device];
  const int64_t mine = used += bytes;
  const int64_t limit = table().limit[device];
  if (limit > 0 && used_by_all(device) > limit) {
    used -= bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory: ", bytes, " bytes more do not fit into the ", limit,
                     " of sim:", int(device));
  }
  int64_t before = peak[device];
  while (mine > before && !peak[device].compare_exchange_weak(before, mine)) {
  }
}

// What keeps a block of device memory alive: memory of the host's allocator, and its size for the accounts.
struct Block {
  c10::DataPtr data;
  int64_t bytes;
  DeviceIndex device;
  static void release(void* self) {
    auto* block = static_cast<Block*>(self);
    own_slot().used[block->device] -= block->bytes;
    delete block;
  }
};

c10::DataPtr to_device(c10::DataPtr data, size_t bytes, DeviceIndex device) {
  take(device, bytes);
  void* at = data.get();
  return {at, new Block{std::move(data), int64_t(bytes), device}, &Block::release, c10::Device(kSim, device)};
}

struct SimAllocator final : at::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return to_device(c10::GetCPUAllocator()->allocate(bytes), bytes, current);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Block::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
SimAllocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

// Pinned memory of the host, whose addresses are remembered.
std::mutex pinned_lock;
std::unordered_set<const void*> pinned;
struct PinnedAllocator final : at::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(data->get());
    return {data->get(), data, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* self) {
    auto* data = static_cast<c10::DataPtr*>(self);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(data->get());
    delete data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

// A generator of the device: the CPU's algorithm, with a state of its own.
struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(DeviceIndex device, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override { return new SimGenerator(device_.index(), host.clone()); }
  static c10::DeviceType device_type() { return kSim; }
  at::Generator host;
};

const at::Generator& default_generator(DeviceIndex device) {
  static std::array<at::Generator, kDevices> all{at::make_generator<SimGenerator>(0),
                                                 at::make_generator<SimGenerator>(1)};
  return all[device < 0 ? current : device];
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(device < 0 ? current : device);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.count(data) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kSim, std::exchange(current, device.index() < 0 ? current : device.index())};
  }
  c10::Device getDevice() const override { return {kSim, current}; }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  return true;
}();

bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

Tensor reshape(Tensor made, const Tensor& like) {
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_neg()) impl->_set_neg(true);
  if (like.is_conj()) impl->_set_conj(true);
  return made;
}

// A tensor of the given device over a storage, with the shape of another.
Tensor make_like(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  return reshape(
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype()), like);
}

// A view of a device tensor, with the shape of another.
Tensor view_like(const Tensor& base, const Tensor& like) {
  return reshape(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                          base.key_set(), like.dtype()),
                 like);
}

// A device tensor as the CPU's kernels see it: the same memory.
Tensor as_host(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto* keep = new c10::Storage(storage);
  c10::DataPtr data{storage.mutable_data(), keep, [](void* p) { delete static_cast<c10::Storage*>(p); },
                    c10::Device(c10::kCPU)};
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  return make_like(std::move(host), c10::DispatchKey::CPU, tensor);
}

// Some accelerators have no float64; a test may ask for one of those.
std::atomic<bool> has_double{true};
void check_type(c10::ScalarType type) {
  TORCH_CHECK_TYPE(type != c10::kDouble || has_double, "this device has no float64; use float32 instead");
}

// A CPU kernel's result as a device tensor; its memory counts from now on.
Tensor as_device(const Tensor& host, DeviceIndex device) {
  check_type(host.scalar_type());
  const auto& storage = host.storage();
  auto* keep = new c10::Storage(storage);
  c10::DataPtr data{storage.mutable_data(), keep, [](void* p) { delete static_cast<c10::Storage*>(p); },
                    c10::Device(c10::kCPU)};
  c10::Storage own(c10::Storage::use_byte_size_t(), storage.nbytes(),
                   to_device(std::move(data), storage.nbytes(), device), &allocator, true);
  return make_like(std::move(own), c10::DispatchKey::PrivateUse1, host);
}

struct Operand {
  Tensor device, host;
  void* at;  // where the memory was before the kernel ran, which may resize what it writes to
};

// One call of a CPU kernel in place of a device's.
class Call {
 public:
  explicit Call(const c10::FunctionSchema& schema) : schema_(schema) {}

  void enter(IValue& value) {
    if (value.isTensor()) {
      value = swap(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(swap(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor.has_value() ? std::optional<Tensor>(swap(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      settle(value.toDevice());
      value = c10::Device(c10::kCPU);
    }
  }

  void enter_generator(IValue& value) {
    if (value.isNone()) {
      value = static_cast<SimGenerator*>(default_generator(device()).unsafeGetGeneratorImpl())->host;
      return;
    }
    at::Generator given = value.toGenerator();
    TORCH_CHECK(given.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
                given.device(), "' (", schema_.operator_name(), ")");
    value = static_cast<SimGenerator*>(given.unsafeGetGeneratorImpl())->host;
  }

  Tensor leave(const Tensor& host) {
    if (!host.defined()) return host;
    for (Operand& operand : operands_)
      if (operand.host.is_same(host)) return refresh(operand);
    for (Operand& operand : operands_)  // a view of an operand
      if (host.storage().data() == operand.at && operand.at != nullptr)
        return view_like(operand.device, host);
    return as_device(host, device());
  }

  void leave(IValue& value) {
    if (value.isTensor()) {
      value = leave(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(leave(tensor));
      value = list;
    }
  }

  void refresh_all() {
    for (Operand& operand : operands_) refresh(operand);
  }

 private:
  DeviceIndex device() const { return device_ < 0 ? current : device_; }

  void settle(c10::Device device) {
    TORCH_CHECK(device_ < 0 || device.index() < 0 || device_ == device.index(),
                "Expected all tensors to be on the same device, but found sim:", int(device_), " and ", device, " in ",
                schema_.operator_name());
    if (device.index() >= 0) device_ = device.index();
  }

  Tensor swap(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_sim(tensor)) {
      TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but found sim and ",
                  tensor.device(), " (a tensor of shape ", tensor.sizes(), ") in ", schema_.operator_name());
      return tensor;
    }
    settle(tensor.device());
    operands_.push_back({tensor, as_host(tensor), tensor.storage().mutable_data()});
    return operands_.back().host;
  }

  // The device tensor again; a kernel may have given it another shape, or other memory.
  Tensor refresh(Operand& operand) {
    auto* impl = operand.device.unsafeGetTensorImpl();
    if (operand.host.storage().data() != operand.at) {
      Tensor moved = as_device(operand.host, device());
      impl->set_storage_keep_dtype(moved.storage());
      operand.at = operand.host.storage().mutable_data();
    }
    if (operand.device.sizes() != operand.host.sizes() || operand.device.strides() != operand.host.strides()) {
      impl->set_storage_offset(operand.host.storage_offset());
      impl->set_sizes_and_strides(operand.host.sizes(), operand.host.strides());
    }
    return operand.device;
  }

  const c10::FunctionSchema& schema_;
  std::vector<Operand> operands_;
  DeviceIndex device_ = -1;
};

std::atomic<int64_t> kernels{0};

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  ++kernels;
  const auto& schema = op.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  Call call(schema);
  for (size_t i = begin; i < stack->size(); ++i) call.enter((*stack)[i]);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto type = schema.arguments()[i].type();
    if (auto inner = type->cast<c10::OptionalType>()) type = inner->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) call.enter_generator((*stack)[begin + i]);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.refresh_all();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) call.leave((*stack)[i]);
}

// Convolutions of a device that PyTorch does not know arrive here; the CPU's own choice of kernel follows.
void run_convolution(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool backward = op.schema().name() == "aten::convolution_backward_overrideable";
  auto real = c10::Dispatcher::singleton().findSchemaOrThrow(
      backward ? "aten::convolution_backward" : "aten::convolution", "");
  if (backward) {  // which is not told of the bias' shape
    std::vector<int64_t> bias{stack->at(stack->size() - 10).toTensor().size(1)};
    stack->insert(stack->end() - 7, IValue(bias));
  }
  run_on_host(real, keys, stack);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kSim, current)));
  check_type(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kSim, current)));
  check_type(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  return at::cpu::set_(tensor, std::move(storage), offset, size, stride);
}

Tensor& set_whole_storage(Tensor& tensor, c10::Storage storage) {
  const int64_t count = int64_t(storage.nbytes() / tensor.itemsize());
  return at::cpu::set_(tensor, std::move(storage), 0, {count}, {1});
}

// The one way between devices.
Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  (is_sim(to) ? as_host(to) : to).copy_(is_sim(from) ? as_host(from) : from);
  return to;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("_copy_from", &copy_from);
  for (const char* loss : {"mse_loss", "smooth_l1_loss"})  // whose variants with an output warn
    m.impl(loss, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
}

// What the device module in Python needs, and what tests ask of the device.
TORCH_LIBRARY(sim, m) {
  m.def("device_count() -> int", []() -> int64_t { return kDevices; });
  m.def("current_device() -> int", []() -> int64_t { return current; });
  m.def("set_device(int device) -> ()", [](int64_t device) { current = DeviceIndex(device); });
  m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    auto generator = default_generator(DeviceIndex(device));
    generator.set_current_seed(uint64_t(seed));
  });
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) {
    return default_generator(DeviceIndex(device)).get_state();
  });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const Tensor& state) {
    auto generator = default_generator(DeviceIndex(device));
    generator.set_state(state);
  });
  m.def("memory(int device) -> int[]", [](int64_t device) -> std::vector<int64_t> {
    const int64_t limit = table().limit[device];
    return {used_by_all(DeviceIndex(device)), peak[device], limit > 0 ? limit : kMemory};
  });
  m.def("reset_peak(int device) -> ()", [](int64_t device) { peak[device] = own_slot().used[device].load(); });
  m.def("set_limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    table().limit[device] = bytes;
  });
  m.def("set_double(bool has) -> ()", [](bool has) { has_double = has; });
  m.def("kernels() -> int", []() -> int64_t { return kernels; });
}
