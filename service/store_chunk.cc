#include "service/store_chunk.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "client/bulk_codec.h"
#include "client/convert.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Bytes of one layer's contribution to a chunk.
std::uint64_t LayerBytes(const TileFormat& format, const v1::StoreChunk& head) {
  return head.kind() == v1::CHUNK_RECORDS
             ? std::uint64_t{head.head_count()} * RecordBytes(format)
             : std::uint64_t{head.head_count()} * RawBytes(format, head.token_count());
}

}  // namespace

absl::Status IdentityOfChunk(const TieredStore::NamespaceInfo& ns, const v1::StoreChunk& head,
                             BlockId* id, BlockOrigin* origin) {
  const std::uint32_t block_tokens = ns.spec.block_tokens;
  if (head.group() >= ns.spec.groups.size()) {
    return absl::InvalidArgumentError(absl::StrCat("block ", head.sequence(), ": layer group ",
                                                   head.group(), ", want below ",
                                                   ns.spec.groups.size()));
  }
  if (head.token_count() == 0 || head.token_count() > block_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("block ", head.sequence(), ": token_count ",
                                                   head.token_count(), ", want 1 to ",
                                                   block_tokens));
  }
  KVMILL_ASSIGN_OR_RETURN(origin->parent, OptionalKeyFromBytes(head.parent()));
  origin->token_count = head.token_count();
  origin->block_index = head.block_index();
  id->namespace_id = ns.id;
  id->group = static_cast<std::uint8_t>(head.group());
  if (head.token_count() < block_tokens) {
    if (head.key().empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "block ", head.sequence(), ": a tail of ", head.token_count(), " tokens without a key: ",
          "want 1 to ", kBlockKeyBytesMax, " bytes that stand for its tokens and all before them"));
    }
    KVMILL_ASSIGN_OR_RETURN(origin->tail_key, BlockKey::FromBytes(head.key()));
    id->key = TailKey(origin->parent, head.token_count(), origin->tail_key);
  } else {
    KVMILL_ASSIGN_OR_RETURN(id->key, BlockKey::FromBytes(head.key()));
  }
  return absl::OkStatus();
}

absl::Status CheckChunk(const TieredStore::NamespaceInfo& ns, const v1::StoreChunk& head,
                        std::uint64_t bulk_bytes) {
  const auto bad = [&](absl::string_view field, std::uint64_t value, std::uint64_t limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", head.sequence(), ": ", field, " ", value, ", want at most ", limit));
  };
  const LayerGroup& group = ns.spec.groups[head.group()];
  const std::uint64_t layer_end = std::uint64_t{head.layer_begin()} + head.layer_count();
  const std::uint64_t head_end = std::uint64_t{head.head_begin()} + head.head_count();
  if (layer_end > group.layers.size()) return bad("layer end", layer_end, group.layers.size());
  if (head_end > group.kv_heads) return bad("head end", head_end, group.kv_heads);
  if (head.layer_count() == 0 || head.head_count() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", head.sequence(), ": a chunk of no layers or no heads"));
  }
  if (head.kind() != v1::CHUNK_PAGES16 && head.kind() != v1::CHUNK_RECORDS) {
    return bad("chunk kind", static_cast<std::uint64_t>(head.kind()), v1::CHUNK_RECORDS);
  }
  const std::uint64_t want = head.layer_count() * LayerBytes(FormatOf(ns.spec, group), head);
  if (bulk_bytes != want) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", head.sequence(), ": chunk of ", bulk_bytes, " bytes, want ", want));
  }
  return absl::OkStatus();
}

absl::StatusOr<WriteResult> WriteChunk(const TieredStore::NamespaceInfo& ns,
                                       const v1::StoreChunk& head,
                                       absl::Span<const absl::Span<const std::byte>> pieces,
                                       BlockWriter& writer) {
  const TileFormat format = FormatOf(ns.spec, ns.spec.groups[head.group()]);
  WriteResult total;
  if (head.kind() == v1::CHUNK_RECORDS) {
    const RowTable records(pieces, RecordBytes(format),
                           std::size_t{head.layer_count()} * head.head_count());
    std::size_t index = 0;
    for (std::uint32_t layer = 0; layer < head.layer_count(); ++layer) {
      for (std::uint32_t h = 0; h < head.head_count(); ++h) {
        KVMILL_ASSIGN_OR_RETURN(
            const WriteResult part,
            writer.WriteRecord(head.layer_begin() + layer, head.head_begin() + h,
                               absl::MakeConstSpan(records.rows()[index++], RecordBytes(format))));
        AddTo(part, &total);
      }
    }
    return total;
  }
  // A row is all heads of one token; each row is a page of one token to the encoder.
  const std::size_t head_bytes = std::size_t{2} * format.head_dim;
  const std::size_t tokens = head.token_count();
  const RowTable rows(pieces, head_bytes * head.head_count(), 2 * tokens * head.layer_count());
  std::vector<HeadInput> inputs(head.head_count());
  for (std::uint32_t layer = 0; layer < head.layer_count(); ++layer) {
    for (std::size_t h = 0; h < inputs.size(); ++h) {
      HeadPages pages;
      pages.offset_bytes = h * head_bytes;
      pages.page_tokens = 1;
      pages.dtype = ns.spec.source_dtype;
      pages.pages = rows.rows() + 2 * tokens * layer;
      inputs[h].k = pages;
      pages.pages += tokens;
      inputs[h].v = pages;
    }
    KVMILL_ASSIGN_OR_RETURN(const WriteResult part, writer.WriteHeads(head.layer_begin() + layer,
                                                                      head.head_begin(), inputs));
    AddTo(part, &total);
  }
  return total;
}

std::uint64_t RawBytesOfChunk(const TieredStore::NamespaceInfo& ns, const v1::StoreChunk& head) {
  const TileFormat format = FormatOf(ns.spec, ns.spec.groups[head.group()]);
  return std::uint64_t{head.layer_count()} * head.head_count() *
         RawBytes(format, head.token_count());
}

void AddTo(const WriteResult& part, WriteResult* total) {
  const std::uint32_t written = total->written_heads + part.written_heads;
  const std::uint32_t existing = total->existing_heads + part.existing_heads;
  if (part.sealed) *total = part;
  total->written_heads = written;
  total->existing_heads = existing;
}

void FillSealed(const WriteResult& sealed, v1::StoreResult* result) {
  result->set_stored_bytes(sealed.block_stored_bytes);
  result->set_tile_bytes(sealed.block_tile_bytes);
  result->set_tile_raw_bytes(sealed.block_tile_raw_bytes);
  result->set_raw_heads(sealed.block_raw_heads);
}

}  // namespace kvmill
