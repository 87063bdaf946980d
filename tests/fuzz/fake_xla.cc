#include "fake_xla.h"

#include <utility>

#include "check.h"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  const jax_w4a8::FakePool* pool;
  std::vector<std::function<void()>> late;
};

namespace jax_w4a8 {
namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->errc, args->message};
}

void GetMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  XLA_FFI_ExecutionContext& context = *args->ctx;
  if (!context.pool->available) {
    return new XLA_FFI_Error{XLA_FFI_Error_Code_UNIMPLEMENTED, "no thread pool"};
  }
  std::function<void()> task = [task = args->task, data = args->data] { task(data); };
  if (context.pool->schedule) {
    context.pool->schedule(std::move(task));
  } else {
    context.late.push_back(std::move(task));
  }
  return nullptr;
}

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  if (!args->ctx->pool->available) {
    return new XLA_FFI_Error{XLA_FFI_Error_Code_UNIMPLEMENTED, "no thread pool"};
  }
  *args->num_threads = args->ctx->pool->threads;
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_GetMessage = GetMessage;
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_ThreadPool_Schedule = Schedule;
  api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
  return api;
}

std::vector<XLA_FFI_Buffer> Describe(std::vector<Tensor>& tensors) {
  std::vector<XLA_FFI_Buffer> buffers;
  for (Tensor& tensor : tensors) {
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, tensor.dtype, tensor.data.get(),
                       static_cast<int64_t>(tensor.dims.size()), tensor.dims.data()});
  }
  return buffers;
}

template <class T>
std::vector<void*> PointersTo(std::vector<T>& items) {
  std::vector<void*> pointers;
  for (T& item : items) pointers.push_back(&item);
  return pointers;
}

}  // namespace

int64_t ByteWidth(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
      return 4;
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_S16:
      return 2;
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_S64:
      return 8;
    default:
      return 1;
  }
}

void Tensor::Allocate(bool null_if_empty) {
  ghost = false;
  bool empty = false;
  for (int64_t size : dims) empty = empty || size <= 0;
  bytes = empty ? 0 : ByteWidth(dtype);
  for (int64_t size : dims) {
    ghost = ghost || (bytes > 0 && size > kMostBytes / bytes);
    bytes = ghost || empty ? 0 : bytes * size;
  }
  data.reset(bytes == 0 && null_if_empty ? nullptr : new uint8_t[static_cast<size_t>(bytes)]);
}

Outcome Call::Run(XLA_FFI_Handler* handler, const FakePool& pool) {
  static const XLA_FFI_Api api = MakeApi();
  XLA_FFI_ExecutionContext context = {&pool, {}};

  std::vector<XLA_FFI_Buffer> arg_buffers = Describe(args), ret_buffers = Describe(rets);
  std::vector<void*> arg_pointers = PointersTo(arg_buffers), ret_pointers = PointersTo(ret_buffers);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);

  std::vector<XLA_FFI_ByteSpan> names;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_Array> arrays;
  std::vector<XLA_FFI_AttrType> attr_types;
  std::vector<void*> attr_pointers;
  names.reserve(attrs.size());
  scalars.reserve(attrs.size());
  arrays.reserve(attrs.size());
  for (Attribute& attr : attrs) {
    names.push_back({attr.name.data(), attr.name.size()});
    name_pointers.push_back(&names.back());
    scalars.push_back({attr.dtype, &attr.value});
    arrays.push_back({attr.dtype, 1, &attr.value});
    attr_types.push_back(attr.type);
    attr_pointers.push_back(attr.type == XLA_FFI_AttrType_SCALAR
                                ? static_cast<void*>(&scalars.back())
                                : static_cast<void*>(&arrays.back()));
  }

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()),
                arg_types.data(), arg_pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()),
                ret_types.data(), ret_pointers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(attrs.size()),
                 attr_types.data(),
                 name_pointers.data(),
                 attr_pointers.data()};

  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  // Helpers that start now find nothing to do, and must not look at what the call has left behind.
  for (std::function<void()>& task : context.late) task();
  return error ? Outcome{error->code, error->message} : Outcome{};
}

}  // namespace jax_w4a8
