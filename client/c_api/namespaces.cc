// Namespaces as the C ABI has them.
#include <utility>

#include "client/c_api/border.h"
#include "client/c_api/queue.h"
#include "storage/core/page_layout.h"

namespace kvmill::c_api {

NamespaceData::NamespaceData(ClientNamespace value)
    : ns(std::move(value)), fingerprint_hex(ToHex(ns.fingerprint)) {
  for (const LayerGroup& group : ns.spec.groups) {
    kvmill_layer_group& to = groups.emplace_back();
    to.struct_bytes = sizeof(to);
    to.layers = group.layers.data();
    to.layer_count = group.layers.size();
    to.kv_heads = group.kv_heads;
    to.head_dim = group.head_dim;
    to.attention = static_cast<std::uint32_t>(group.attention);
    to.window_tokens = group.window_tokens;
    group_begin.push_back(layer_groups.size());
    layer_groups.insert(layer_groups.end(), group.layers.size(), groups.size() - 1);
  }
}

}  // namespace kvmill::c_api

using namespace kvmill;         // NOLINT(google-build-using-namespace): the functions are C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" {

void kvmill_namespace_free(kvmill_namespace* ns) { delete ns; }

const char* kvmill_namespace_name(const kvmill_namespace* ns) {
  return ns == nullptr ? nullptr : ns->data->ns.name.c_str();
}

const char* kvmill_namespace_fingerprint(const kvmill_namespace* ns) {
  return ns == nullptr ? nullptr : ns->data->fingerprint_hex.c_str();
}

kvmill_code kvmill_namespace_get_spec(const kvmill_namespace* ns, kvmill_namespace_spec* spec) {
  return Guard([&]() -> absl::Status {
    if (ns == nullptr) return Null("ns");
    const NamespaceSpec& from = ns->data->ns.spec;
    kvmill_namespace_spec to = {};
    to.groups = ns->data->groups.data();
    to.group_count = ns->data->groups.size();
    to.model = from.model.c_str();
    to.revision = from.revision.c_str();
    to.adapter_digest = from.adapter_digest.c_str();
    to.salt = from.salt.c_str();
    to.hash_scheme = from.hash_scheme.c_str();
    to.source_dtype = static_cast<std::uint32_t>(from.source_dtype);
    to.block_tokens = from.block_tokens;
    to.key_bits = from.key_bits;
    to.value_bits = from.value_bits;
    to.frame = static_cast<std::uint32_t>(from.frame);
    to.sink_blocks = from.sink_blocks;
    return WriteStruct("spec", to, spec);
  });
}

size_t kvmill_namespace_layer_count(const kvmill_namespace* ns) {
  return ns == nullptr ? 0 : ns->data->layer_count();
}

size_t kvmill_namespace_record_bytes(const kvmill_namespace* ns, size_t layer) {
  if (ns == nullptr || layer >= ns->data->layer_count()) return 0;
  return RecordBytes(FormatOf(ns->data->ns.spec, ns->data->group_of(layer)));
}

size_t kvmill_namespace_page_bytes_max(const kvmill_namespace* ns, size_t layer) {
  if (ns == nullptr || layer >= ns->data->layer_count()) return 0;
  const NamespaceSpec& spec = ns->data->ns.spec;
  const LayerGroup& group = ns->data->group_of(layer);
  return UniformPageBytes(FormatOf(spec, group), spec.block_tokens, SlotKind::kRaw, group.kv_heads);
}

}  // extern "C"
