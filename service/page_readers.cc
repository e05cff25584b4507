#include "service/page_readers.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "storage/core/check.h"

namespace kvmill {

PageReaders::~PageReaders() {
  MutexLock lock(mu_);
  KVMILL_CHECK(stores_.empty());
}

absl::StatusOr<PageReaders::StorePtr> PageReaders::Begin(const std::string& tenant,
                                                         const std::string& session,
                                                         std::uint64_t number,
                                                         std::uint64_t registration) {
  StorePtr store(new Store(*this, tenant, {session, number}, registration));
  bool added = false;
  {
    MutexLock lock(mu_);
    added = stores_.emplace(store->id_, store.get()).second;
  }
  if (added) return store;
  return absl::AlreadyExistsError(absl::StrCat("store ", number, " of the session is running"));
}

void PageReaders::CancelOne(Store& store, const absl::Status& why, const WaitPtr& wait) {
  store.cancelled_.Update(why);
  if (wait == nullptr) return;
  ++wait->stores;
  if (store.reading_ == 0) return;
  ++wait->reading;
  store.waits_.push_back(wait);
}

template <typename Select>
void PageReaders::CancelThese(const Select& select, const absl::Status& why, Answer answer) {
  const auto wait = std::make_shared<Wait>();
  bool at_rest = false;
  {
    MutexLock lock(mu_);
    select([&](Store& store) { CancelOne(store, why, wait); });
    at_rest = wait->reading == 0;
    if (!at_rest) wait->answer = std::move(answer);
  }
  if (at_rest) answer(wait->stores);
}

void PageReaders::Cancel(const std::string& tenant, const std::string& session,
                         absl::Span<const std::uint64_t> numbers, Answer answer) {
  CancelThese(
      [&](const auto& cancel) {
        for (const std::uint64_t number : numbers) {
          const auto it = stores_.find({session, number});
          if (it != stores_.end() && it->second->tenant_ == tenant) cancel(*it->second);
        }
      },
      absl::CancelledError("its caller gave the store up"), std::move(answer));
}

void PageReaders::CancelRegistration(std::uint64_t registration, Answer answer) {
  CancelThese(
      [&](const auto& cancel) {
        for (const auto& [id, store] : stores_) {
          if (store->registration_ == registration) cancel(*store);
        }
      },
      absl::CancelledError("UnregisterMemory came before the block was stored: register its memory "
                           "and store it again"),
      std::move(answer));
}

void PageReaders::CancelSession(const std::string& session) {
  const absl::Status why = absl::AbortedError("the session ended: register the memory again");
  MutexLock lock(mu_);
  for (auto it = stores_.lower_bound({session, 0});
       it != stores_.end() && it->first.first == session; ++it) {
    CancelOne(*it->second, why, nullptr);
  }
}

std::size_t PageReaders::stores() const {
  MutexLock lock(mu_);
  return stores_.size();
}

PageReaders::Store::~Store() {
  MutexLock lock(owner_.mu_);
  KVMILL_CHECK(reading_ == 0 && waits_.empty());
  // Another one's, when this one could not begin.
  const auto it = owner_.stores_.find(id_);
  if (it != owner_.stores_.end() && it->second == this) owner_.stores_.erase(it);
}

absl::Status PageReaders::Store::BeginRead() {
  MutexLock lock(owner_.mu_);
  if (cancelled_.ok()) ++reading_;
  return cancelled_;
}

void PageReaders::Store::EndRead() {
  std::vector<WaitPtr> over;
  {
    MutexLock lock(owner_.mu_);
    if (--reading_ > 0) return;
    for (WaitPtr& wait : waits_) {
      if (--wait->reading == 0) over.push_back(std::move(wait));
    }
    waits_.clear();
  }
  for (const WaitPtr& wait : over) wait->answer(wait->stores);
}

}  // namespace kvmill
