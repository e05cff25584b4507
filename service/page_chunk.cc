#include "service/page_chunk.h"

#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "service/store_chunk.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// The entry that has all layers and heads of the chunk; null when none does.
const EngineLayers* EntryOf(const EngineGeometry& geometry, const v1::StoreChunk& head) {
  for (const EngineLayers& entry : geometry.layers) {
    if (entry.group == head.group() && entry.layer_begin <= head.layer_begin() &&
        std::uint64_t{head.layer_begin()} + head.layer_count() <=
            entry.layer_begin + entry.keys.size() &&
        entry.head_begin <= head.head_begin() &&
        std::uint64_t{head.head_begin()} + head.head_count() <=
            std::uint64_t{entry.head_begin} + entry.head_count) {
      return &entry;
    }
  }
  return nullptr;
}

// Who encodes the layer's values; null: the CPU, from shared memory.
DeviceEncoder* EncoderOf(const EngineMemory& memory, const EnginePlace& place) {
  return memory.shared(place.region)->encoder();
}

// The pages of the chunk in one layer's K or V.
using Pages = absl::InlinedVector<const std::byte*, 16>;
void FindPages(const EngineMemory& memory, const EngineLayers& entry, const EnginePlace& place,
               const v1::PageNumbers& numbers, Pages* pages) {
  const std::byte* first = memory.shared(place.region)->data() + place.offset_bytes;
  pages->clear();
  for (const std::uint64_t number : numbers.numbers()) {
    pages->push_back(first + number * entry.page_stride_bytes);
  }
}

}  // namespace

absl::Status CheckPageChunk(const TieredStore::NamespaceInfo& ns, const EngineMemory& memory,
                            const v1::StoreChunk& head) {
  const auto bad = [&](absl::string_view what, std::uint64_t value, absl::string_view want) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", head.sequence(), ": ", what, " ", value, ", want ", want));
  };
  if (!head.has_pages()) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", head.sequence(), ": a store of pages takes page numbers"));
  }
  if (head.layer_count() == 0 || head.head_count() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", head.sequence(), ": a chunk of no layers or no heads"));
  }
  const EngineLayers* entry = EntryOf(memory.geometry(), head);
  if (entry == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block ", head.sequence(), ": layers ", head.layer_begin(), " to ",
        std::uint64_t{head.layer_begin()} + head.layer_count(), " and heads ", head.head_begin(),
        " to ", std::uint64_t{head.head_begin()} + head.head_count(), " of group ", head.group(),
        " are in no entry of the registration"));
  }
  const bool records = entry->element == EngineElement::kRecords;
  if (head.kind() != (records ? v1::CHUNK_RECORDS : v1::CHUNK_PAGES16)) {
    return bad("chunk kind", static_cast<std::uint64_t>(head.kind()),
               records ? "records, as registered" : "16-bit pages, as registered");
  }
  if (records && head.token_count() != ns.spec.block_tokens) {
    return bad("token_count", head.token_count(), "a whole block, for records");
  }
  const std::uint64_t pages =
      (std::uint64_t{head.token_count()} + entry->page_tokens - 1) / entry->page_tokens;
  if (static_cast<std::uint64_t>(head.pages().numbers_size()) != pages) {
    return bad("page count", static_cast<std::uint64_t>(head.pages().numbers_size()),
               absl::StrCat(pages, " for ", head.token_count(), " tokens"));
  }
  for (const std::uint64_t number : head.pages().numbers()) {
    if (number >= entry->page_count) {
      return bad("page number", number, absl::StrCat("below ", entry->page_count));
    }
  }
  for (std::uint32_t layer = 0; layer < head.layer_count(); ++layer) {
    const std::size_t i = head.layer_begin() - entry->layer_begin + layer;
    for (const std::vector<EnginePlace>* places : {&entry->keys, &entry->values}) {
      if (i >= places->size() || memory.shared((*places)[i].region) != nullptr) continue;
      return absl::FailedPreconditionError(absl::StrCat("block ", head.sequence(), ": region ",
                                                        (*places)[i].region,
                                                        " of the registration is not shared"));
    }
    if (!records && EncoderOf(memory, entry->keys[i]) != EncoderOf(memory, entry->values[i])) {
      return absl::FailedPreconditionError(
          absl::StrCat("block ", head.sequence(), ": K of layer ", head.layer_begin() + layer,
                       " in region ", entry->keys[i].region, " and V in region ",
                       entry->values[i].region, ": one is in shared memory, the other on a GPU"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<WriteResult> WritePageChunk(const TieredStore::NamespaceInfo& ns,
                                           const EngineMemory& memory, const v1::StoreChunk& head,
                                           BlockWriter& writer) {
  const EngineLayers& entry = *EntryOf(memory.geometry(), head);
  const std::size_t record_bytes = RecordBytes(FormatOf(ns.spec, ns.spec.groups[head.group()]));
  const std::uint32_t first_head = head.head_begin() - entry.head_begin;
  WriteResult total;
  Pages keys;
  Pages values;
  std::vector<std::byte> copy;  // Of a record on a GPU.
  absl::InlinedVector<HeadInput, 16> inputs(head.head_count());
  for (std::uint32_t layer = 0; layer < head.layer_count(); ++layer) {
    const std::size_t i = head.layer_begin() - entry.layer_begin + layer;
    FindPages(memory, entry, entry.keys[i], head.pages(), &keys);
    DeviceEncoder* const encoder = EncoderOf(memory, entry.keys[i]);
    if (entry.element == EngineElement::kRecords) {
      for (std::uint32_t h = 0; h < head.head_count(); ++h) {
        const std::byte* record = keys[0] + (first_head + h) * entry.head_stride_bytes;
        if (encoder != nullptr) {
          copy.resize(record_bytes);
          KVMILL_RETURN_IF_ERROR(encoder->ReadBytes(record, record_bytes, nullptr, copy.data()));
          record = copy.data();
        }
        KVMILL_ASSIGN_OR_RETURN(
            const WriteResult part,
            writer.WriteRecord(head.layer_begin() + layer, head.head_begin() + h,
                               absl::MakeConstSpan(record, record_bytes)));
        AddTo(part, &total);
      }
      continue;
    }
    FindPages(memory, entry, entry.values[i], head.pages(), &values);
    for (std::uint32_t h = 0; h < head.head_count(); ++h) {
      HeadPages pages;
      pages.offset_bytes = (first_head + h) * entry.head_stride_bytes;
      pages.page_tokens = entry.page_tokens;
      pages.token_stride_bytes = static_cast<std::ptrdiff_t>(entry.token_stride_bytes);
      pages.dtype = ns.spec.source_dtype;
      pages.pages = keys.data();
      inputs[h].k = pages;
      pages.pages = values.data();
      inputs[h].v = pages;
    }
    const std::uint32_t to_layer = head.layer_begin() + layer;
    KVMILL_ASSIGN_OR_RETURN(
        const WriteResult part,
        encoder == nullptr
            ? writer.WriteHeads(to_layer, head.head_begin(), inputs)
            : writer.WriteDeviceHeads(to_layer, head.head_begin(), inputs, *encoder, nullptr));
    AddTo(part, &total);
  }
  return total;
}

bool IsOnGpu(const EngineMemory& memory, const v1::StoreChunk& head) {
  const EngineLayers& entry = *EntryOf(memory.geometry(), head);
  return EncoderOf(memory, entry.keys[head.layer_begin() - entry.layer_begin]) != nullptr;
}

std::uint64_t BytesOfPageChunk(const TieredStore::NamespaceInfo& ns, const v1::StoreChunk& head) {
  if (head.kind() != v1::CHUNK_RECORDS) return RawBytesOfChunk(ns, head);
  return std::uint64_t{head.layer_count()} * head.head_count() *
         RecordBytes(FormatOf(ns.spec, ns.spec.groups[head.group()]));
}

}  // namespace kvmill
