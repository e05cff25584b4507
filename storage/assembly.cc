#include "storage/assembly.h"

#include <algorithm>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kernels/encode.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"
#include "storage/head_source.h"
#include "storage/quantization_errors.h"

namespace kvmill {
namespace {

bool HasFiniteScales(const TileFormat& format, absl::Span<const std::byte> record) {
  const RecordLayout layout = LayoutOf(format);
  const auto finite = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += 2) {
      std::uint16_t half;
      std::memcpy(&half, record.data() + i, sizeof(half));
      if ((half & 0x7C00u) == 0x7C00u) return false;
    }
    return true;
  };
  return finite(layout.k_scale, layout.v_codes) && finite(layout.v_channel, layout.bytes);
}

}  // namespace

SlotKind SlotKindOf(const NamespaceSpec& spec, const BlockOrigin& origin) {
  const bool raw = origin.token_count < spec.block_tokens || origin.block_index < spec.sink_blocks;
  return raw ? SlotKind::kRaw : SlotKind::kTile;
}

BlockWriter::Assembly::Assembly(AssemblyHost& host, OpenedNamespace& space, const BlockId& id,
                                const BlockOrigin& origin)
    : host_(host),
      space_(space),
      id_(id),
      origin_(origin),
      group_(space.spec.groups[id.group]),
      format_(FormatOf(space.spec, group_)),
      raw_(SlotKindOf(space.spec, origin) == SlotKind::kRaw),
      layer_count_(static_cast<std::uint32_t>(group_.layers.size())),
      head_count_(group_.kv_heads),
      layers_(layer_count_),
      claimed_((std::size_t{layer_count_} * head_count_ + 63) / 64),
      last_progress_nanos_(host.clock().MonotonicNanos()) {}

BlockWriter::Assembly::~Assembly() {
  for (SlotRef slot : slots_) host_.pool().Release(slot);
}

PageIdentity BlockWriter::Assembly::IdentityOf(std::uint32_t layer) const {
  PageIdentity identity;
  identity.fingerprint = space_.fingerprint;
  identity.key = id_.key;
  identity.group_index = id_.group;
  identity.layer = group_.layers[layer];
  identity.head_count = group_.kv_heads;
  identity.token_count = static_cast<std::uint16_t>(origin_.token_count);
  identity.format = format_;
  identity.source_dtype = space_.spec.source_dtype;
  identity.frame = space_.spec.frame;
  return identity;
}

absl::Status BlockWriter::Assembly::Prepare() {
  const SlotKind kind = raw_ ? SlotKind::kRaw : SlotKind::kTile;
  const std::size_t page_bytes = UniformPageBytes(format_, origin_.token_count, kind, head_count_);
  TenantCharge charge;
  KVMILL_RETURN_IF_ERROR(
      host_.Charge(space_.tenant_id, std::uint64_t{page_bytes} * layer_count_, &charge));
  {
    MutexLock lock(mu_);
    charge_ = std::move(charge);
  }
  KVMILL_RETURN_IF_ERROR(host_.AcquirePages(space_.tenant_id, page_bytes, layer_count_, &slots_));
  const std::vector<SlotKind> kinds(head_count_, kind);
  for (std::uint32_t layer = 0; layer < layer_count_; ++layer) {
    pages_.push_back(host_.pool().Bytes(slots_[layer]).first(page_bytes));
    InitPage(IdentityOf(layer), kinds, pages_.back());
  }
  return absl::OkStatus();
}

absl::Status BlockWriter::Assembly::CheckWritable() const {
  switch (state_.load(std::memory_order_acquire)) {
    case State::kOpen:
      return absl::OkStatus();
    case State::kSealed:
      return absl::AlreadyExistsError("the block is sealed");
    case State::kAbandoned:
      break;
  }
  MutexLock lock(mu_);
  return absl::AbortedError(absl::StrCat("the block was given up: ", why_.message()));
}

absl::Status BlockWriter::Assembly::CheckRange(std::uint32_t layer, std::size_t head_begin,
                                               std::size_t head_count) const {
  if (layer >= layer_count_) {
    return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " of layer group ",
                                                   int{id_.group}, ": it has ", layer_count_));
  }
  if (head_count == 0 || head_begin >= head_count_ || head_count > head_count_ - head_begin) {
    return absl::InvalidArgumentError(absl::StrCat("heads ", head_begin, " to ",
                                                   head_begin + head_count,
                                                   " (exclusive): the model has ", head_count_));
  }
  return absl::OkStatus();
}

bool BlockWriter::Assembly::Claim(std::uint32_t layer, std::uint32_t head) {
  const std::size_t bit = std::size_t{layer} * head_count_ + head;
  const std::uint64_t mask = std::uint64_t{1} << (bit % 64);
  return (claimed_[bit / 64].fetch_or(mask, std::memory_order_relaxed) & mask) == 0;
}

absl::Status BlockWriter::Assembly::NonFiniteError(std::uint32_t layer, std::uint32_t head,
                                                   const HeadInput& input) const {
  const NonFinite where = FindNonFinite(input.k, input.v, origin_.token_count, format_.head_dim);
  return absl::InvalidArgumentError(absl::StrCat("not finite: ", where.in_value ? "V" : "K",
                                                 " of layer ", group_.layers[layer], " head ", head,
                                                 " token ", where.token, " channel ", where.channel,
                                                 "; a block must hold finite values only"));
}

absl::Status BlockWriter::Assembly::WriteRaw(std::uint32_t layer, std::uint32_t head,
                                             const HeadInput& input, std::byte* to) const {
  // What is checked is the copy: the input may be memory that somebody else can still write to.
  const std::size_t row_bytes = std::size_t{format_.head_dim} * 2;
  const std::byte* const copies[2] = {to, to + row_bytes * origin_.token_count};
  HeadInput copy;
  for (HeadPages* half : {&copy.k, &copy.v}) {
    half->pages = &copies[half == &copy.v ? 1 : 0];
    half->page_tokens = origin_.token_count;
    half->token_stride_bytes = static_cast<std::ptrdiff_t>(row_bytes);
    half->dtype = space_.spec.source_dtype;
  }
  for (const HeadPages* half : {&input.k, &input.v}) {
    for (std::uint32_t token = 0; token < origin_.token_count; ++token, to += row_bytes) {
      const std::byte* row = half->Row(token);
      if (half->channel_stride_bytes == 2) {
        std::memcpy(to, row, row_bytes);
        continue;
      }
      for (std::uint32_t channel = 0; channel < format_.head_dim; ++channel) {
        std::memcpy(to + std::size_t{channel} * 2, row + channel * half->channel_stride_bytes, 2);
      }
    }
  }
  if (FindNonFinite(copy.k, copy.v, origin_.token_count, format_.head_dim).found) {
    return NonFiniteError(layer, head, copy);
  }
  return absl::OkStatus();
}

absl::Status BlockWriter::Assembly::KeepRaw(std::uint32_t layer, std::uint32_t head,
                                            const HeadInput& input) {
  std::vector<std::byte> bytes(RawBytes(format_, origin_.token_count));
  KVMILL_RETURN_IF_ERROR(WriteRaw(layer, head, input, bytes.data()));
  MutexLock lock(mu_);
  raw_heads_[layer][head] = std::move(bytes);
  return absl::OkStatus();
}

absl::StatusOr<WriteResult> BlockWriter::Assembly::WriteHeads(std::uint32_t layer,
                                                              std::uint32_t head_begin,
                                                              absl::Span<const HeadInput> heads,
                                                              HeadSource& source) {
  KVMILL_RETURN_IF_ERROR(CheckRange(layer, head_begin, heads.size()));
  for (const HeadInput& input : heads) {
    if (input.k.dtype != space_.spec.source_dtype || input.v.dtype != space_.spec.source_dtype) {
      return absl::InvalidArgumentError("source dtype differs from the namespace's");
    }
  }
  KVMILL_RETURN_IF_ERROR(CheckWritable());

  WriteResult result;
  absl::InlinedVector<EncodeArgs, 16> tiles;
  absl::InlinedVector<std::uint32_t, 16> tile_heads;  // Index into `heads` of each tile.
  const std::int64_t start_nanos = host_.clock().MonotonicNanos();
  for (std::uint32_t i = 0; i < heads.size(); ++i) {
    const std::uint32_t head = head_begin + i;
    if (!Claim(layer, head)) {
      ++result.existing_heads;
      continue;
    }
    ++result.written_heads;
    if (!raw_) {
      tiles.push_back({heads[i].k, heads[i].v, SlotContents(pages_[layer], head).data()});
      tile_heads.push_back(i);
      continue;
    }
    const absl::StatusOr<HeadInput> input =
        source.OnHost(heads[i], origin_.token_count, format_.head_dim);
    absl::Status copied =
        input.ok() ? WriteRaw(layer, head, *input, SlotContents(pages_[layer], head).data())
                   : input.status();
    if (!copied.ok()) {
      Abandon(copied);
      return copied;
    }
    SealSlot(pages_[layer], head);
    ++result.raw_heads;
  }
  absl::InlinedVector<EncodeResult, 16> outcomes(tiles.size());
  if (!tiles.empty()) {
    absl::Status status =
        source.Encode(format_, space_.spec.frame, tiles, absl::MakeSpan(outcomes));
    if (!status.ok()) {
      Abandon(status);
      return status;
    }
    for (std::size_t t = 0; t < tiles.size(); ++t) {
      const std::uint32_t head = head_begin + tile_heads[t];
      if (outcomes[t] == EncodeResult::kTile) {
        SealSlot(pages_[layer], head);
        continue;
      }
      const absl::StatusOr<HeadInput> input =
          source.OnHost(heads[tile_heads[t]], origin_.token_count, format_.head_dim);
      if (!input.ok()) {
        status = input.status();
      } else if (outcomes[t] == EncodeResult::kRaw) {
        status = KeepRaw(layer, head, *input);
        ++result.raw_heads;
      } else {
        status = NonFiniteError(layer, head, *input);
      }
      if (!status.ok()) {
        Abandon(status);
        return status;
      }
    }
  }
  const std::int64_t now_nanos = host_.clock().MonotonicNanos();
  host_.ObserveEncode(static_cast<double>(now_nanos - start_nanos) * 1e-9);
  last_progress_nanos_.store(now_nanos, std::memory_order_relaxed);
  if (QuantizationErrors* const errors = host_.errors(); errors != nullptr && !tiles.empty()) {
    SampleErrors(*errors, layer, head_begin, heads, tile_heads, outcomes, source);
  }
  KVMILL_RETURN_IF_ERROR(Finish(layer, result.written_heads, &result));
  return result;
}

void BlockWriter::Assembly::SampleErrors(QuantizationErrors& errors, std::uint32_t layer,
                                         std::uint32_t head_begin,
                                         absl::Span<const HeadInput> heads,
                                         absl::Span<const std::uint32_t> tile_heads,
                                         absl::Span<const EncodeResult> outcomes,
                                         HeadSource& source) {
  const QuantizationErrors::Samples samples = errors.SamplesOf(tile_heads.size());
  for (std::size_t t = samples.first; t < tile_heads.size(); t += samples.interval) {
    if (outcomes[t] != EncodeResult::kTile) continue;  // Raw: nothing is lost.
    const std::int64_t start_nanos = host_.clock().MonotonicNanos();
    const std::uint32_t i = tile_heads[t];
    const absl::StatusOr<HeadInput> input =
        source.OnHost(heads[i], origin_.token_count, format_.head_dim);
    if (!input.ok()) return;  // The tile is there all the same.
    // Before Finish: its page stays where it is until all its heads are finished.
    errors.Observe(space_, format_, *input, SlotContents(pages_[layer], head_begin + i).data());
    host_.ObserveDecode(static_cast<double>(host_.clock().MonotonicNanos() - start_nanos) * 1e-9);
  }
}

absl::StatusOr<WriteResult> BlockWriter::Assembly::WriteRecord(std::uint32_t layer,
                                                               std::uint32_t head,
                                                               absl::Span<const std::byte> record) {
  KVMILL_RETURN_IF_ERROR(CheckRange(layer, head, 1));
  if (raw_) {
    return absl::InvalidArgumentError(
        "a record for a block that is stored raw (sink block or tail)");
  }
  if (record.size() != RecordBytes(format_)) {
    return absl::InvalidArgumentError(
        absl::StrCat("record of ", record.size(), " bytes: want ", RecordBytes(format_)));
  }
  if (!HasFiniteScales(format_, record)) {
    return absl::InvalidArgumentError(absl::StrCat("record of layer ", group_.layers[layer],
                                                   " head ", head,
                                                   " has a scale that is not finite"));
  }
  KVMILL_RETURN_IF_ERROR(CheckWritable());
  WriteResult result;
  if (!Claim(layer, head)) {
    result.existing_heads = 1;
    return result;
  }
  result.written_heads = 1;
  const absl::Span<std::byte> copy = SlotContents(pages_[layer], head).first(record.size());
  std::memcpy(copy.data(), record.data(), record.size());
  if (!HasFiniteScales(format_, copy)) {  // Changed since it was checked: it is shared memory.
    const absl::Status changed = absl::InvalidArgumentError(
        absl::StrCat("record of layer ", group_.layers[layer], " head ", head,
                     " was changed while it was stored; it has a scale that is not finite"));
    Abandon(changed);
    return changed;
  }
  SealSlot(pages_[layer], head);
  last_progress_nanos_.store(host_.clock().MonotonicNanos(), std::memory_order_relaxed);
  KVMILL_RETURN_IF_ERROR(Finish(layer, 1, &result));
  return result;
}

absl::Status BlockWriter::Assembly::Finish(std::uint32_t layer, std::uint32_t written,
                                           WriteResult* result) {
  if (written == 0) return absl::OkStatus();
  // acq_rel: the writer that completes a count sees every other writer's bytes.
  if (layers_[layer].done.fetch_add(written, std::memory_order_acq_rel) + written == head_count_) {
    const absl::Status finished = FinishLayer(layer);
    if (!finished.ok()) {
      // No room for the raw heads: the block is given up like one whose writer failed.
      Abandon(finished);
      return finished;
    }
  }
  const std::uint32_t done = done_.fetch_add(written, std::memory_order_acq_rel) + written;
  if (done != layer_count_ * head_count_) return absl::OkStatus();
  State open = State::kOpen;
  if (!state_.compare_exchange_strong(open, State::kSealed)) return CheckWritable();
  absl::Status sealed = Seal(result);
  // A copy that was sealed first leaves this one sealed, too: that is what later writers are told.
  if (!sealed.ok() && !absl::IsAlreadyExists(sealed)) {
    // No room in the index: given up.
    state_.store(State::kOpen, std::memory_order_release);
    Abandon(sealed);
  }
  return sealed;
}

absl::Status BlockWriter::Assembly::FinishLayer(std::uint32_t layer) {
  RawHeads raw_heads;  // Complete: every writer of this layer is done.
  {
    MutexLock lock(mu_);
    if (const auto it = raw_heads_.find(layer); it != raw_heads_.end()) {
      raw_heads = std::move(it->second);
      raw_heads_.erase(it);
    }
  }
  if (!raw_heads.empty()) {
    raw_head_count_.fetch_add(static_cast<std::uint32_t>(raw_heads.size()),
                              std::memory_order_relaxed);
    KVMILL_RETURN_IF_ERROR(RebuildPage(layer, raw_heads));
  }
  SealHeader(pages_[layer]);
  layers_[layer].finished.store(true, std::memory_order_release);
  host_.LayerFinished(*this, layer);
  return absl::OkStatus();
}

absl::Span<const std::byte> BlockWriter::Assembly::FinishedPage(std::uint32_t layer) const {
  if (layer >= layer_count_ || !layers_[layer].finished.load(std::memory_order_acquire)) return {};
  return pages_[layer];
}

absl::Status BlockWriter::Assembly::RebuildPage(std::uint32_t layer, const RawHeads& raw_heads) {
  std::vector<SlotKind> kinds(head_count_, SlotKind::kTile);
  for (const auto& [head, bytes] : raw_heads) kinds[head] = SlotKind::kRaw;
  const std::size_t page_bytes = PageBytes(format_, origin_.token_count, kinds);
  // Raw heads are longer than the tiles that were expected.
  KVMILL_CHECK(page_bytes > pages_[layer].size());
  TenantCharge more;
  KVMILL_RETURN_IF_ERROR(host_.Charge(space_.tenant_id, page_bytes - pages_[layer].size(), &more));
  std::vector<SlotRef> slot;
  KVMILL_RETURN_IF_ERROR(host_.AcquirePages(space_.tenant_id, page_bytes, 1, &slot));
  {
    MutexLock lock(mu_);
    charge_.Join(std::move(more));
  }
  const absl::Span<std::byte> page = host_.pool().Bytes(slot[0]).first(page_bytes);
  InitPage(IdentityOf(layer), kinds, page);
  for (std::uint32_t head = 0; head < head_count_; ++head) {
    const auto raw = raw_heads.find(head);
    const absl::Span<const std::byte> from = raw != raw_heads.end()
                                                 ? absl::MakeConstSpan(raw->second)
                                                 : SlotContents(pages_[layer], head);
    std::memcpy(SlotContents(page, head).data(), from.data(), from.size());
    SealSlot(page, head);
  }
  host_.pool().Release(slots_[layer]);
  slots_[layer] = slot[0];
  pages_[layer] = page;
  return absl::OkStatus();
}

absl::Status BlockWriter::Assembly::Seal(WriteResult* result) {
  SealedBlock block;
  block.id = id_;
  block.origin = origin_;
  block.space = &space_;
  block.raw_bytes = RawBytes(format_, origin_.token_count) * layer_count_ * head_count_;
  block.raw_heads =
      raw_ ? layer_count_ * head_count_ : raw_head_count_.load(std::memory_order_relaxed);
  for (std::uint32_t layer = 0; layer < layer_count_; ++layer) {
    host_.pool().Publish(slots_[layer]);
    block.page_bytes.push_back(static_cast<std::uint32_t>(pages_[layer].size()));
    block.stored_bytes += pages_[layer].size();
  }
  const std::uint32_t tile_heads = layer_count_ * head_count_ - block.raw_heads;
  result->sealed = true;
  result->block_stored_bytes = block.stored_bytes;
  result->block_tile_bytes = tile_heads * RecordBytes(format_);
  result->block_tile_raw_bytes = tile_heads * RawBytes(format_, origin_.token_count);
  result->block_raw_heads = block.raw_heads;
  block.slots = std::exchange(slots_, {});
  const absl::Status committed = host_.Commit(*this, &block);
  if (!committed.ok()) {
    slots_ = std::move(block.slots);
    return committed;
  }
  MutexLock lock(mu_);
  charge_.BecomesBlock();
  return committed;
}

void BlockWriter::Assembly::SealedElsewhere() {
  State open = State::kOpen;
  state_.compare_exchange_strong(open, State::kSealed, std::memory_order_acq_rel);
}

void BlockWriter::Assembly::Abandon(const absl::Status& why) {
  {
    MutexLock lock(mu_);
    State open = State::kOpen;
    // Under the lock, so that whoever sees kAbandoned also sees why_.
    if (!state_.compare_exchange_strong(open, State::kAbandoned, std::memory_order_acq_rel)) return;
    why_ = why;
  }
  host_.Abandoned(*this, why);
}

BlockWriter::BlockWriter(std::shared_ptr<Assembly> assembly) : assembly_(std::move(assembly)) {}

absl::StatusOr<WriteResult> BlockWriter::WriteHeads(std::uint32_t layer, std::uint32_t head_begin,
                                                    absl::Span<const HeadInput> heads) {
  HostHeads source(assembly_->algorithm());
  return assembly_->WriteHeads(layer, head_begin, heads, source);
}

absl::StatusOr<WriteResult> BlockWriter::WriteDeviceHeads(std::uint32_t layer,
                                                          std::uint32_t head_begin,
                                                          absl::Span<const HeadInput> heads,
                                                          DeviceEncoder& encoder,
                                                          DeviceEvent* ready) {
  DeviceHeads source(encoder, ready);
  return assembly_->WriteHeads(layer, head_begin, heads, source);
}

absl::StatusOr<WriteResult> BlockWriter::WriteRecord(std::uint32_t layer, std::uint32_t head,
                                                     absl::Span<const std::byte> record) {
  return assembly_->WriteRecord(layer, head, record);
}

}  // namespace kvmill
