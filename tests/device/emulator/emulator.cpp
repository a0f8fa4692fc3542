// A CUDA device on the CPU build of PyTorch: real tensors on "cuda:0" and "cuda:1", computed by CPU kernels.
//
// Loaded before torch is imported, it registers what libtorch_cuda would register: a device guard, the hooks of CUDA,
// an allocator, generators, and kernels for the dispatch key CUDA. One boxed fallback serves every operator: it gives
// CPU aliases of the tensors to the CPU kernel and gives the results back as tensors of the device. Because the guard
// reports devices, autograd starts a device thread for each, and backward runs there, as on a GPU.
//
// What is checked or counted: tensors of two devices in one operator are an error; fresh memory is NaN (0xff bytes);
// launches, synchronisations, and the bytes that are allocated now and were at the peak.
//
// Not emulated: streams, events and graphs (they do nothing), CUDA's own kernels (bf16 arithmetic, attention).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::Allocator;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IntArrayRef;
using c10::IValue;
using c10::Storage;
using c10::Stream;

constexpr DeviceIndex kDevices = 2;

// --- Counters and callbacks ------------------------------------------------------------------------------------------

std::atomic<size_t> live{0}, peak{0};
int (*on_wait)(const char*) = nullptr;  // not 0: waiting is an error
void (*on_launch)(const char*) = nullptr;

void waited(const char* what) {
  TORCH_CHECK(!on_wait || !on_wait(what), "called a synchronizing CUDA operation (emulated: ", what, ")");
}

void launched(const char* what) {
  if (on_launch) on_launch(what);
}

// The caching allocator of CUDA rounds every block up to 512 bytes.
size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

void allocated(size_t bytes) {
  size_t now = live += bytes, most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
}

// --- Devices and streams ---------------------------------------------------------------------------------------------

// Per thread, as in CUDA: a thread that nobody told otherwise is on device 0.
thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kDevices> current_stream{};

DeviceIndex index_of(Device device) { return device.index() < 0 ? current : device.index(); }
Device cuda(DeviceIndex index) { return Device(DeviceType::CUDA, index); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream(c10::StreamId id, DeviceIndex index) { return Stream(Stream::UNSAFE, cuda(index), id); }

  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return cuda(current); }
  void setDevice(Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = index_of(device); }
  Device exchangeDevice(Device device) const override {
    auto before = current;
    current = index_of(device);
    return cuda(before);
  }

  Stream getStream(Device device) const override { return stream(current_stream[index_of(device)], index_of(device)); }
  Stream getDefaultStream(Device device) const override { return stream(0, index_of(device)); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<int> next{1};
    return stream(next++, index_of(device));
  }
  Stream exchangeStream(Stream given) const override {
    auto index = given.device_index();
    auto before = current_stream[index];
    current_stream[index] = given.id();
    return stream(before, index);
  }

  // Every operator is done when it returns, so there is nothing to record or to wait for.
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// --- Random generators -----------------------------------------------------------------------------------------------

// A generator of the device, which CPU kernels are given as the CPU generator that it holds.
struct Generator final : at::CPUGeneratorImpl {
  at::Generator on_cpu;

  explicit Generator(DeviceIndex index)
      : at::CPUGeneratorImpl(0), on_cpu(at::detail::createCPUGenerator(67280421310721ULL)) {
    device_ = cuda(index);
  }
  // Another stream of numbers than the CPU's of the same seed, as on a GPU.
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed ^ 0x5bd1e995); }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    auto owned = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state));
    on_cpu.set_state(Tensor(std::move(owned)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return on_cpu.get_state().getIntrusivePtr(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->on_cpu = on_cpu.clone();
    return copy;
  }
};

at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < kDevices; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all[index < 0 ? current : index];
}

at::Generator cpu_generator(const at::Generator& given) {
  return static_cast<Generator*>(given.unsafeGetGeneratorImpl())->on_cpu;
}

// --- Memory ----------------------------------------------------------------------------------------------------------

constexpr size_t kHeader = 64;

void release(void* data) {
  char* block = static_cast<char*>(data) - kHeader;
  live -= *reinterpret_cast<size_t*>(block);
  free(block);
}

void release_nothing(void*) {}

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    if (!bytes) return DataPtr(nullptr, nullptr, &release_nothing, cuda(current));
    size_t size = rounded(bytes);
    char* block = static_cast<char*>(aligned_alloc(kHeader, size + kHeader));
    *reinterpret_cast<size_t*>(block) = size;
    char* data = block + kHeader;
    memset(data, 0xff, bytes);  // NaN in every floating-point dtype
    allocated(size);
    return DataPtr(data, data, &release, cuda(current));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} device_memory;

// Memory of the CPU that counts as pinned: copies from and to it need not wait.
struct PinnedMemory final : Allocator {
  static std::mutex& lock() {
    static std::mutex mutex;
    return mutex;
  }
  static std::map<const char*, size_t>& blocks() {
    static std::map<const char*, size_t> all;
    return all;
  }
  static void unpin(void* data) {
    {
      std::lock_guard<std::mutex> held(lock());
      blocks().erase(static_cast<char*>(data));
    }
    free(data);
  }
  static bool holds(const void* data) {
    std::lock_guard<std::mutex> held(lock());
    auto after = blocks().upper_bound(static_cast<const char*>(data));
    if (after == blocks().begin()) return false;
    --after;
    return data < after->first + after->second;
  }
  DataPtr allocate(size_t bytes) override {
    size_t size = rounded(bytes ? bytes : 1);
    char* data = static_cast<char*>(aligned_alloc(64, size));
    std::lock_guard<std::mutex> held(lock());
    blocks()[data] = size;
    return DataPtr(data, data, &unpin, Device(DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_memory;

struct SetAllocatorOnce {
  SetAllocatorOnce() { c10::SetAllocator(DeviceType::CUDA, &device_memory); }
} set_allocator_once;

// --- What torch asks of CUDA -----------------------------------------------------------------------------------------

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::holds(data); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : std::exchange(current, index);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  // The first one of each device is the default one: torch.cuda.default_generators is made before all others.
  at::Generator getNewGenerator(DeviceIndex index) const override {
    static std::set<DeviceIndex> given;
    auto device = index < 0 ? current : index;
    if (given.insert(device).second) return default_generator(device);
    return at::make_generator<Generator>(device);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
};

struct RegisterHooks {
  RegisterHooks() {
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs arguments) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<Hooks>(arguments);
    });
  }
} register_hooks;

int64_t attention_by_formula(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

struct SetAttention {
  SetAttention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_by_formula); }
} set_attention;

// --- Tensors of the CPU and of the device on one memory --------------------------------------------------------------

Tensor with_storage(const Tensor& like, Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

Tensor on_cpu(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto* kept = new Storage(storage);
  DataPtr data(const_cast<void*>(storage.data()), kept, [](void* k) { delete static_cast<Storage*>(k); }, DeviceType::CPU);
  Storage alias(
      Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU), /*resizable=*/true);
  return with_storage(tensor, std::move(alias), DispatchKey::CPU);
}

Tensor cpu_alias(const Tensor& tensor) { return tensor.is_cuda() ? on_cpu(tensor) : tensor; }

// What a CPU kernel allocated for its result counts as memory of the device from now on.
Storage adopted(const Storage& storage, Device device) {
  struct Adopted {
    Storage storage;
    size_t bytes;
  };
  auto* kept = new Adopted{storage, rounded(storage.nbytes())};
  allocated(kept->bytes);
  auto let_go = [](void* k) {
    live -= static_cast<Adopted*>(k)->bytes;
    delete static_cast<Adopted*>(k);
  };
  DataPtr data(const_cast<void*>(storage.data()), kept, let_go, device);
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), &device_memory, /*resizable=*/true);
}

Tensor on_device(const Tensor& of_cpu, Device device) {
  return with_storage(of_cpu, adopted(of_cpu.storage(), device), DispatchKey::CUDA);
}

// --- One kernel for every operator -----------------------------------------------------------------------------------

// Operators whose CUDA kernel reads a number back before it returns.
const std::set<std::string> kWaiting{
    "aten::_unique2", "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::masked_select", "aten::nonzero",
    "aten::repeat_interleave.Tensor", "aten::unique_consecutive", "aten::unique_dim"};

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// CUDA kernels that take CPU tensors with dimensions: indices, and what copies.
bool takes_cpu_tensors(const std::string& name) {
  return starts_with(name, "aten::index.Tensor") || starts_with(name, "aten::index_put") ||
      starts_with(name, "aten::_index_put") || starts_with(name, "aten::set_");
}

[[noreturn]] void refuse_two_devices(Device one, Device other, const std::string& name) {
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other,
      "! (emulated, in ", name, ")");
}

// The arguments of one call as the CPU kernel takes them, and the way back.
class Call {
 public:
  explicit Call(std::string name) : name_(std::move(name)) {}

  Tensor given(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu() && tensor.dim()) cpu_seen_ = true;
    if (!tensor.is_cuda()) return tensor;
    if (!device_) device_ = tensor.device();
    if (tensor.device() != *device_ && tensor.dim()) refuse_two_devices(*device_, tensor.device(), name_);
    auto alias = on_cpu(tensor);
    kept_.push_back(alias);
    tensors_[alias.unsafeGetTensorImpl()] = tensor;
    storages_.emplace(tensor.storage().data(), tensor.storage());
    return alias;
  }

  IValue given(const IValue& value, const std::string& argument) {
    if (value.isTensor()) return given(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(given(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& index : value.toOptionalTensorList())
        list.push_back(index ? std::optional<Tensor>(given(*index)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) {
      asked_ = value.toDevice();
      return asked_->is_cuda() ? IValue(Device(DeviceType::CPU)) : value;
    }
    if (value.isGenerator() && value.toGenerator().defined()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      return cpu_generator(generator);
    }
    if (value.isNone() && argument == "generator") return cpu_generator(default_generator(device_ ? device_->index() : -1));
    return value;
  }

  void check_devices() const {
    if (!device_ || !cpu_seen_) return;
    if (!takes_cpu_tensors(name_)) refuse_two_devices(DeviceType::CPU, *device_, name_);
    if (name_.find("index_put") != std::string::npos) waited("copy of indices from the CPU");
  }

  Tensor returned(const Tensor& result) const {
    bool asked_for_cpu = asked_ && !asked_->is_cuda();
    if (!result.defined() || !result.is_cpu() || asked_for_cpu) return result;
    auto found = tensors_.find(result.unsafeGetTensorImpl());
    if (found != tensors_.end()) return written(found->second, result);
    auto shared = storages_.find(result.storage().data());
    if (shared != storages_.end() && result.storage().data())
      return with_storage(result, shared->second, DispatchKey::CUDA);
    Device target = asked_ ? cuda(index_of(*asked_)) : device_ ? *device_ : cuda(current);
    return on_device(result, target);
  }

  IValue returned(const IValue& value) const {
    if (value.isTensor()) return returned(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(returned(tensor));
    return list;
  }

 private:
  // An argument that was written in place or resized.
  static Tensor written(const Tensor& tensor, const Tensor& result) {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (result.storage().data() != tensor.storage().data())
      impl->set_storage_keep_dtype(adopted(result.storage(), tensor.device()));
    if (tensor.sizes() != result.sizes() || tensor.strides() != result.strides())
      impl->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return tensor;
  }

  std::string name_;
  std::optional<Device> device_, asked_;
  bool cpu_seen_ = false;
  std::vector<Tensor> kept_;
  std::map<const c10::TensorImpl*, Tensor> tensors_;  // alias on the CPU -> tensor of the device
  std::map<const void*, Storage> storages_;
};

// CUDA turns a mask into indices, for which it waits, unless a single number is written.
bool writes_by_a_mask(const std::string& name, const IValue* arguments) {
  if (name != "aten::_index_put_impl_" || arguments[2].toTensor().numel() == 1) return false;
  for (const std::optional<Tensor>& index : arguments[1].toOptionalTensorList())
    if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
  return false;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  launched(name.c_str());
  const auto count = schema.arguments().size(), begin = stack->size() - count;
  if (kWaiting.count(name) || writes_by_a_mask(name, stack->data() + begin)) waited(name.c_str());
  Call call(name);
  for (size_t i = 0; i < count; i++) (*stack)[begin + i] = call.given((*stack)[begin + i], schema.arguments()[i].name());
  call.check_devices();
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) (*stack)[i] = call.returned((*stack)[i]);
}

// --- Operators that allocate, view or copy ---------------------------------------------------------------------------

struct OnDevice {
  explicit OnDevice(std::optional<Device> device) : before(std::exchange(current, index_of(device.value_or(cuda(-1))))) {}
  ~OnDevice() { current = before; }
  DeviceIndex before;
};

void refuse_to_pin(std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  refuse_to_pin(pinned);
  OnDevice there(device);
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pinned) {
  refuse_to_pin(pinned);
  OnDevice there(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  launched("aten::copy_");
  bool crosses = source.numel() && self.is_cuda() != source.is_cuda();
  bool may_run_on = non_blocking && (self.is_cuda() ? source : self).is_pinned();
  if (crosses && !may_run_on && (self.is_cpu() || !non_blocking))
    waited(self.is_cpu() ? "copy to the CPU" : "copy from the CPU");
  at::NoGradGuard no_graph;
  cpu_alias(self).copy_(cpu_alias(source));
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  auto written = target;
  copy_(written, self, non_blocking);
  return target;
}

at::Scalar local_scalar(const Tensor& tensor) {
  waited("_local_scalar_dense");
  return on_cpu(tensor).item();
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  return self;
}

// Products of 16 bits with a result in fp32: the CPU has no kernel for them.
Tensor wide_product(const char* name, const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  launched(name);
  TORCH_CHECK(
      a.dim() == 2 && b.dim() == 2 && a.scalar_type() == b.scalar_type() && dtype == at::kFloat &&
          (a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16),
      name, " takes matrices of 16 bits and gives fp32");
  return at::mm(on_cpu(a).to(dtype), on_cpu(b).to(dtype));
}

Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  at::NoGradGuard no_graph;
  return on_device(wide_product("aten::mm.dtype", a, b, dtype), a.device());
}

Tensor& mm_dtype_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  TORCH_CHECK(out.scalar_type() == dtype, "mm.dtype_out: out has another dtype");
  at::NoGradGuard no_graph;
  on_cpu(out).copy_(wide_product("aten::mm.dtype_out", a, b, dtype));
  return out;
}

Tensor sum_with(const Tensor& self, const Tensor& product, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::add(at::mul(on_cpu(self).to(product.scalar_type()), beta), product, alpha);
}

Tensor addmm_dtype(
    const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha) {
  at::NoGradGuard no_graph;
  return on_device(sum_with(self, wide_product("aten::addmm.dtype", a, b, dtype), beta, alpha), self.device());
}

Tensor& addmm_dtype_out(
    const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha,
    Tensor& out) {
  TORCH_CHECK(out.scalar_type() == dtype, "addmm.dtype_out: out has another dtype");
  at::NoGradGuard no_graph;
  on_cpu(out).copy_(sum_with(self, wide_product("aten::addmm.dtype_out", a, b, dtype), beta, alpha));
  return out;
}

// CUDA counts whole numbers, too.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  launched("aten::histc");
  at::NoGradGuard no_graph;
  return on_device(at::histc(on_cpu(self).to(at::kDouble), bins, min, max).to(self.scalar_type()), self.device());
}

// The CPU's reads the offsets, for which it would wait.
Tensor grouped_mm(
    const Tensor& a, const Tensor& b, const std::optional<Tensor>& offsets, const std::optional<Tensor>& bias,
    std::optional<at::ScalarType> dtype) {
  launched("aten::_grouped_mm");
  at::NoGradGuard no_graph;
  auto given = [](const std::optional<Tensor>& t) { return t ? std::optional<Tensor>(on_cpu(*t)) : std::nullopt; };
  return on_device(at::_grouped_mm(on_cpu(a), on_cpu(b), given(offsets), given(bias), dtype), a.device());
}

// A softmax of fp16 whose result is fp32, which the CPU lacks, and its backward.
template <Tensor& (*kernel)(Tensor&, const Tensor&, int64_t, bool)>
Tensor& softmax_out(const Tensor& self, int64_t dim, bool half_to_float, Tensor& out) {
  launched("aten::_softmax.out");
  at::NoGradGuard no_graph;
  auto result = on_cpu(out);
  kernel(result, half_to_float ? on_cpu(self).to(at::kFloat) : on_cpu(self), dim, false);
  return out;
}

template <Tensor (*kernel)(const Tensor&, const Tensor&, int64_t, at::ScalarType)>
Tensor& softmax_backward_out(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType, Tensor& out) {
  launched("aten::_softmax_backward_data.out");
  at::NoGradGuard no_graph;
  on_cpu(out).copy_(kernel(on_cpu(grad), on_cpu(output), dim, grad.scalar_type()));
  return out;
}

// The cell of an LSTM, which on CUDA is one kernel: (hy, cy, the four gates).
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& cx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  launched("aten::_thnn_fused_lstm_cell");
  at::NoGradGuard no_graph;
  auto sum = on_cpu(of_input) + on_cpu(of_hidden);
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) sum = sum + on_cpu(*bias);
  auto gates = sum.chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  auto cy = f * on_cpu(cx) + i * g;
  auto there = of_input.device();
  return {on_device(o * cy.tanh(), there), on_device(cy, there), on_device(at::cat({i, f, g, o}, 1), there)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  launched("aten::_thnn_fused_lstm_cell_backward_impl");
  at::NoGradGuard no_graph;
  auto given = [&](const std::optional<Tensor>& t) { return t && t->defined() ? on_cpu(*t) : at::zeros_like(on_cpu(cx)); };
  auto gates = on_cpu(workspace).chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  auto dhy = given(grad_hy), t = on_cpu(cy).tanh();
  auto dc = given(grad_cy) + dhy * o * (1 - t * t);
  auto gradients = at::cat(
      {dc * g * i * (1 - i), dc * on_cpu(cx) * f * (1 - f), dc * i * (1 - g * g), dhy * t * o * (1 - o)}, 1);
  auto there = cx.device();
  auto of_bias = has_bias ? on_device(gradients.sum(0), there) : Tensor();
  return {on_device(gradients, there), on_device(dc * f, there), of_bias};
}

// The CPU's draws from the CPU's generator, since it is given none.
std::tuple<Tensor, Tensor> dropout(const Tensor& self, double p, std::optional<bool> train) {
  launched("aten::native_dropout");
  at::NoGradGuard no_graph;
  auto x = on_cpu(self);
  double kept = train.value_or(true) ? 1 - p : 1;
  auto mask = at::empty_like(x, x.options().dtype(at::kBool));
  mask.bernoulli_(kept, cpu_generator(default_generator(self.device().index())));
  auto result = x * mask * (kept ? 1 / kept : 0);
  return {on_device(result, self.device()), on_device(mask, self.device())};
}

bool is_not_there(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, int64_t) { return false; }
bool is_not_there_for_lengths_in_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor& set_storage(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

Tensor& set_whole_storage(Tensor& self, Storage storage) {
  int64_t count = storage.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_cpu_(self, storage, 0, {count}, {});
}

Tensor& set_nothing(Tensor& self) {
  Storage storage(Storage::use_byte_size_t(), 0, &device_memory, /*resizable=*/true);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_", &set_nothing);
  library.impl("histc", &histc);
  library.impl("_grouped_mm", &grouped_mm);
  library.impl("mm.dtype", &mm_dtype);
  library.impl("mm.dtype_out", &mm_dtype_out);
  library.impl("addmm.dtype", &addmm_dtype);
  library.impl("addmm.dtype_out", &addmm_dtype_out);
  library.impl("record_stream", [](Tensor&, Stream) {});
  // Not by the kernel that PyTorch chooses for CUDA: the CPU has no grouped ones, and their backward is no operator.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("native_dropout", &dropout);
  library.impl("_softmax.out", &softmax_out<&at::_softmax_out>);
  library.impl("_log_softmax.out", &softmax_out<&at::_log_softmax_out>);
  library.impl("_softmax_backward_data.out", &softmax_backward_out<&at::_softmax_backward_data>);
  library.impl("_log_softmax_backward_data.out", &softmax_backward_out<&at::_log_softmax_backward_data>);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  for (const char* library_of_cuda : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    library.impl(library_of_cuda, &is_not_there);
    library.impl((std::string(library_of_cuda) + ".Tensor").c_str(), &is_not_there_for_lengths_in_tensors);
  }
}

extern "C" {
int emulated_devices() { return kDevices; }
int emulated_device() { return current; }
void emulated_set_device(int index) { current = index; }
long emulated_stream(int index) { return current_stream[index < 0 ? current : index]; }
size_t emulated_live_bytes() { return live; }
size_t emulated_peak_bytes() { return peak; }
void emulated_reset_peak() { peak = live.load(); }
void emulated_on_wait(int (*callback)(const char*)) { on_wait = callback; }
void emulated_on_launch(void (*callback)(const char*)) { on_launch = callback; }
}
