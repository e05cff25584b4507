#include "storage/rocks_blocks.h"

#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "rocksdb/iterator.h"
#include "rocksdb/write_batch.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kPageOverheadBytes = 32 + 10 + 10 + 36;

absl::string_view ViewOf(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

}  // namespace

std::uint64_t DiskBytesOf(const DiskBlockMeta& meta) {
  std::uint64_t bytes = 0;
  for (const std::uint32_t page_bytes : meta.page_bytes) bytes += page_bytes + kPageOverheadBytes;
  return bytes;
}

absl::StatusOr<DecodedMeta> FindBlock(RocksDatabase& database, const std::string& meta_key) {
  rocksdb::PinnableSlice value;
  KVMILL_RETURN_IF_ERROR(ToStatus(
      database.db()->Get(rocksdb::ReadOptions(), database.meta(), meta_key, &value), "meta"));
  return DecodeMeta(meta_key, ViewOf(value));
}

absl::Status PutBlock(RocksDatabase& database, const ColumnFamily& family,
                      const std::string& meta_key, const DiskBlockMeta& meta,
                      std::uint64_t block_number,
                      absl::Span<const absl::Span<const std::byte>> pages) {
  std::unique_ptr<rocksdb::WriteBatch> batch = database.TakeBatch();
  rocksdb::Status status;
  for (std::size_t i = 0; status.ok() && i < pages.size(); ++i) {
    const PageKey key = EncodePageKey(block_number, i);
    status =
        batch->Put(family.get(), rocksdb::Slice(key.data(), key.size()),
                   rocksdb::Slice(reinterpret_cast<const char*>(pages[i].data()), pages[i].size()));
  }
  if (status.ok()) {
    status = batch->Put(database.meta(), meta_key, EncodeMetaValue(meta_key, meta, block_number));
  }
  absl::Status written = status.ok() ? database.Write(batch.get()) : ToStatus(status, "batch");
  database.GiveBatch(std::move(batch));
  return written;
}

absl::Status ReadPages(RocksDatabase& database, const ColumnFamily& family,
                       std::uint64_t block_number, std::size_t first_page,
                       absl::Span<const absl::Span<std::byte>> out) {
  const std::size_t page_count = out.size();
  std::vector<PageKey> keys(page_count);
  std::vector<rocksdb::Slice> slices(page_count);
  for (std::size_t i = 0; i < page_count; ++i) {
    keys[i] = EncodePageKey(block_number, first_page + i);
    slices[i] = rocksdb::Slice(keys[i].data(), keys[i].size());
  }
  std::vector<rocksdb::PinnableSlice> values(page_count);
  std::vector<rocksdb::Status> statuses(page_count);
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  options.verify_checksums = false;  // Pages carry their own, which every reader verifies.
  database.db()->MultiGet(options, family.get(), page_count, slices.data(), values.data(),
                          statuses.data(), /*sorted_input=*/true);
  for (std::size_t i = 0; i < page_count; ++i) {
    if (statuses[i].IsNotFound() || statuses[i].IsIncomplete() || statuses[i].IsPathNotFound()) {
      return absl::DataLossError(
          absl::StrFormat("page %d: %s", first_page + i, statuses[i].ToString()));
    }
    KVMILL_RETURN_IF_ERROR(ToStatus(statuses[i], absl::StrFormat("page %d", first_page + i)));
    if (values[i].size() != out[i].size()) {
      return absl::DataLossError(absl::StrFormat("page %d: %d bytes, want %d", first_page + i,
                                                 values[i].size(), out[i].size()));
    }
    std::memcpy(out[i].data(), values[i].data(), out[i].size());
  }
  return absl::OkStatus();
}

absl::Status EraseMeta(RocksDatabase& database, absl::Span<const std::string> meta_keys) {
  if (meta_keys.empty()) return absl::OkStatus();
  rocksdb::WriteBatch batch;
  for (const std::string& meta_key : meta_keys) {
    KVMILL_RETURN_IF_ERROR(ToStatus(batch.Delete(database.meta(), meta_key), "meta"));
  }
  return database.Write(&batch);
}

absl::Status ScanMeta(
    RocksDatabase& database,
    absl::FunctionRef<bool(absl::string_view meta_key, absl::StatusOr<DecodedMeta> entry)> visit) {
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  options.readahead_size = std::size_t{2} << 20;
  const std::unique_ptr<rocksdb::Iterator> it(database.db()->NewIterator(options, database.meta()));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const absl::string_view meta_key = ViewOf(it->key());
    if (!visit(meta_key, DecodeMeta(meta_key, ViewOf(it->value())))) return absl::OkStatus();
  }
  return ToStatus(it->status(), "scan of meta");
}

}  // namespace kvmill
