#include "client/c_api/arguments.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c_api/border.h"
#include "client/c_api/operation.h"
#include "storage/core/status_macros.h"

namespace kvmill::c_api {
namespace {

constexpr std::uint32_t kEncodeThreadsMax = 1024;

absl::Status Within(absl::string_view what, std::size_t index, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(what, " ", index, ": ", status.message()));
}

absl::StatusOr<std::string> Text(absl::string_view what, const char* text) {
  if (text == nullptr) return std::string();
  const std::size_t bytes = strnlen(text, kNamespaceStringBytesMax + 1);
  if (bytes > kNamespaceStringBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is longer than ", kNamespaceStringBytesMax, " bytes"));
  }
  return std::string(text, bytes);
}

// Into a narrower field of ours, whose own limits are checked afterwards.
template <typename T>
absl::Status Narrow(absl::string_view what, std::uint32_t value, T* out) {
  *out = static_cast<T>(value);
  if (static_cast<std::uint32_t>(*out) == value) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " ", value, " is too large"));
}

absl::Status ReadGroup(const kvmill_layer_group& group, LayerGroup* to) {
  if (group.layer_count > kLayersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(group.layer_count, " layers, at most ", kLayersMax));
  }
  if (group.layer_count > 0 && group.layers == nullptr) return Null("layers");
  to->layers.assign(group.layers, group.layers + group.layer_count);
  KVMILL_RETURN_IF_ERROR(Narrow("kv_heads", group.kv_heads, &to->kv_heads));
  KVMILL_RETURN_IF_ERROR(Narrow("head_dim", group.head_dim, &to->head_dim));
  to->window_tokens = group.window_tokens;
  return ToEnum("attention", group.attention, AttentionKind::kLatent, &to->attention);
}

KvView ViewOf(const kvmill_kv& kv) {
  KvView view;
  view.data = static_cast<const std::byte*>(kv.data);
  view.pages = reinterpret_cast<const std::byte* const*>(kv.pages);
  view.offset_bytes = kv.offset_bytes;
  view.page_tokens = kv.page_tokens;
  view.token_stride_bytes = kv.token_stride_bytes;
  view.head_stride_bytes = kv.head_stride_bytes;
  return view;
}

absl::StatusOr<LayerInput> LayerOf(const NamespaceData& ns, std::size_t index,
                                   const kvmill_store_layer& layer, std::uint32_t token_count,
                                   const kvmill_store_options& options) {
  LayerInput input;
  if (layer.records != nullptr) {
    const LayerGroup& group = ns.group_of(index);
    const std::size_t heads = options.head_count == 0 ? group.kv_heads : options.head_count;
    const std::size_t want = heads * RecordBytes(FormatOf(ns.ns.spec, group));
    if (layer.records_bytes != want || token_count != ns.ns.spec.block_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("records of ", layer.records_bytes,
                                                     " bytes for ", token_count, " tokens, want ",
                                                     want, " for ", ns.ns.spec.block_tokens));
    }
    input.records = static_cast<const std::byte*>(layer.records);
    return input;
  }
  for (const kvmill_kv* kv : {&layer.k, &layer.v}) {
    if (kv->tokens != 0 && kv->tokens < token_count) {
      return absl::InvalidArgumentError(
          absl::StrCat(kv->tokens, " tokens are there, want ", token_count));
    }
  }
  input.k = ViewOf(layer.k);
  input.v = ViewOf(layer.v);
  return input;
}

absl::Status AppendBlock(const NamespaceData& ns, const kvmill_store_options& options,
                         const kvmill_store_block& block, StoreInputs* inputs) {
  StoreBlock& to = inputs->blocks.emplace_back();
  KVMILL_ASSIGN_OR_RETURN(to.key, KeyOf("key", block.key));
  KVMILL_ASSIGN_OR_RETURN(to.parent, KeyOf("parent", block.parent));
  to.token_count = block.token_count;
  to.block_index = block.block_index;
  if (block.layer_count != ns.layer_count()) {
    return absl::InvalidArgumentError(
        absl::StrCat(block.layer_count, " layers, the namespace has ", ns.layer_count()));
  }
  const auto add_layer = [&](std::size_t l, const kvmill_store_layer& layer) {
    const absl::StatusOr<LayerInput> input = LayerOf(ns, l, layer, block.token_count, options);
    if (input.ok()) inputs->layers.push_back(*input);
    return Within("layer", l, input.status());
  };
  constexpr std::size_t kLeast = offsetof(kvmill_store_layer, v) + sizeof(kvmill_kv);
  return ReadArray("layers", block.layers, block.layer_count, kLeast, add_layer);
}

}  // namespace

absl::StatusOr<BlockKey> KeyOf(absl::string_view what, const kvmill_key& key) {
  if (key.bytes == 0) return BlockKey();
  if (key.data == nullptr) return Null(absl::StrCat(what, ".data"));
  absl::StatusOr<BlockKey> made =
      BlockKey::FromBytes(absl::string_view(static_cast<const char*>(key.data), key.bytes));
  if (made.ok()) return made;
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", made.status().message()));
}

absl::StatusOr<Elsewhere> ElsewhereOf(const kvmill_elsewhere* given) {
  kvmill_elsewhere from;
  KVMILL_RETURN_IF_ERROR(ReadOptions("elsewhere", given, &from));
  Elsewhere to;
  if (from.hint != nullptr) to.hint = from.hint;
  KVMILL_ASSIGN_OR_RETURN(to.anchor, KeyOf("anchor", from.anchor));
  to.first_block = from.first_block;
  to.local_only = from.local_only != 0;
  KVMILL_RETURN_IF_ERROR(CheckElsewhere(to));
  return to;
}

absl::StatusOr<std::vector<BlockKey>> KeysOf(const kvmill_key* keys, std::size_t count) {
  if (count > kCountMax) {
    return absl::InvalidArgumentError(absl::StrCat(count, " keys, at most ", kCountMax));
  }
  if (count > 0 && keys == nullptr) return Null("keys");
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::string what = absl::StrCat("key ", i);
    KVMILL_ASSIGN_OR_RETURN(made[i], KeyOf(what, keys[i]));
    if (made[i].empty()) return absl::InvalidArgumentError(absl::StrCat(what, " is empty"));
  }
  return made;
}

absl::StatusOr<std::vector<TailCandidate>> TailsOf(const kvmill_tail* tails, std::size_t count) {
  std::vector<TailCandidate> made;
  const auto add = [&made](std::size_t i, const kvmill_tail& tail) -> absl::Status {
    const std::string what = absl::StrCat("tail ", i);
    TailCandidate& to = made.emplace_back();
    KVMILL_ASSIGN_OR_RETURN(to.key, KeyOf(what, tail.key));
    if (to.key.empty()) return absl::InvalidArgumentError(absl::StrCat(what, ": its key is empty"));
    to.token_count = tail.token_count;
    to.block_index = tail.block_index;
    return absl::OkStatus();
  };
  constexpr std::size_t kLeast = offsetof(kvmill_tail, block_index) + sizeof(std::uint32_t);
  KVMILL_RETURN_IF_ERROR(ReadArray("tails", tails, count, kLeast, add));
  return made;
}

absl::StatusOr<NamespaceSpec> SpecOf(const kvmill_namespace_spec* in) {
  kvmill_namespace_spec from;
  constexpr std::size_t kLeast =
      offsetof(kvmill_namespace_spec, group_count) + sizeof(from.group_count);
  KVMILL_RETURN_IF_ERROR(ReadStruct("spec", in, kLeast, &from));
  NamespaceSpec spec;
  KVMILL_ASSIGN_OR_RETURN(spec.model, Text("model", from.model));
  KVMILL_ASSIGN_OR_RETURN(spec.revision, Text("revision", from.revision));
  KVMILL_ASSIGN_OR_RETURN(spec.adapter_digest, Text("adapter_digest", from.adapter_digest));
  KVMILL_ASSIGN_OR_RETURN(spec.salt, Text("salt", from.salt));
  KVMILL_ASSIGN_OR_RETURN(spec.hash_scheme, Text("hash_scheme", from.hash_scheme));
  KVMILL_RETURN_IF_ERROR(
      ToEnum("source_dtype", from.source_dtype, DType::kBFloat16, &spec.source_dtype));
  KVMILL_RETURN_IF_ERROR(ToEnum("frame", from.frame, Frame::kRotated, &spec.frame));
  if (from.block_tokens != 0) spec.block_tokens = from.block_tokens;
  if (from.key_bits != 0) {
    KVMILL_RETURN_IF_ERROR(Narrow("key_bits", from.key_bits, &spec.key_bits));
  }
  if (from.value_bits != 0) {
    KVMILL_RETURN_IF_ERROR(Narrow("value_bits", from.value_bits, &spec.value_bits));
  }
  spec.sink_blocks = from.sink_blocks;
  const auto add_group = [&spec](std::size_t, const kvmill_layer_group& group) {
    return ReadGroup(group, &spec.groups.emplace_back());
  };
  constexpr std::size_t kGroupLeast = offsetof(kvmill_layer_group, head_dim) + sizeof(uint32_t);
  KVMILL_RETURN_IF_ERROR(
      ReadArray("groups", from.groups, from.group_count, kGroupLeast, add_group));
  return spec;
}

RequestPtr RequestOf(const kvmill_call_options& call) {
  constexpr std::size_t kTextBytes = 4096;  // Cut there it is still too long.
  const auto text = [](const char* given) {
    return given == nullptr ? std::string() : std::string(given, strnlen(given, kTextBytes));
  };
  RequestContext context =
      RightPartsOf({text(call.request_id), text(call.traceparent), text(call.tracestate)});
  if (context.empty()) return nullptr;
  return std::make_shared<const RequestContext>(std::move(context));
}

absl::Status ReadClientOptions(absl::string_view name, const kvmill_client_options* in,
                               kvmill_client_options* out) {
  constexpr std::size_t kLeast = offsetof(kvmill_client_options, address) + sizeof(out->address);
  KVMILL_RETURN_IF_ERROR(ReadStruct(name, in, kLeast, out));
  return out->address == nullptr ? Null(absl::StrCat(name, ".address")) : absl::OkStatus();
}

absl::StatusOr<Client::Options> ClientOptionsOf(const kvmill_client_options& from) {
  Client::Options to;
  to.address = from.address;
  if (from.timeout_ms != 0) {
    KVMILL_ASSIGN_OR_RETURN(to.timeout, TimeoutOf(from.timeout_ms));
  }
  KVMILL_RETURN_IF_ERROR(ToEnum("path", from.path, DataPath::kUcx, &to.path));
  to.data_plane_plaintext = from.data_plane_plaintext != 0;
  KVMILL_RETURN_IF_ERROR(ToEnum("encode_in", from.encode_in, EncodeIn::kDaemon, &to.encode_in));
  KVMILL_RETURN_IF_ERROR(ToEnum("when_away", from.when_away, WhenAway::kMiss, &to.when_away));
  if (from.encode_threads > kEncodeThreadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("encode_threads ", from.encode_threads, ", at most ", kEncodeThreadsMax));
  }
  to.encode_threads = from.encode_threads;
  const auto text = [](const char* given) { return given == nullptr ? "" : given; };
  to.tls.ca = text(from.tls_ca);
  to.tls.certificate = text(from.tls_certificate);
  to.tls.key = text(from.tls_key);
  to.tls.server_name = text(from.tls_server_name);
  to.token = text(from.token);
  if (from.session_queue == nullptr) return to;
  KVMILL_RETURN_IF_ERROR(CheckProcess(from.session_queue->queue->pid()));
  // Not kept alive: its owner may destroy it before the client.
  std::weak_ptr<Queue> queue = from.session_queue->queue;
  to.on_session_event = [queue, tag = from.session_tag](SessionEvent event, std::uint64_t leases) {
    const std::shared_ptr<Queue> to_queue = queue.lock();
    if (to_queue == nullptr) return;
    auto result = std::make_unique<kvmill_result>();
    result->operation = KVMILL_SESSION_EVENT;
    result->tag = tag;
    result->value = SessionNotice{event, leases};
    to_queue->Tell(std::move(result));
  };
  return to;
}

absl::StatusOr<std::unique_ptr<StoreInputs>> StoreInputsOf(const NamespaceData& ns,
                                                           const kvmill_store_block* blocks,
                                                           std::size_t block_count,
                                                           const kvmill_store_options& options) {
  auto inputs = std::make_unique<StoreInputs>();
  const auto add_block = [&](std::size_t i, const kvmill_store_block& block) {
    return Within("block", i, AppendBlock(ns, options, block, inputs.get()));
  };
  constexpr std::size_t kLeast = offsetof(kvmill_store_block, token_count) + sizeof(uint32_t);
  KVMILL_RETURN_IF_ERROR(ReadArray("blocks", blocks, block_count, kLeast, add_block));
  // Only now: the vector moved while it grew.
  const auto layers = absl::MakeConstSpan(inputs->layers);
  for (std::size_t i = 0; i < block_count; ++i) {
    inputs->blocks[i].layers = layers.subspan(i * ns.layer_count(), ns.layer_count());
  }
  return inputs;
}

}  // namespace kvmill::c_api
