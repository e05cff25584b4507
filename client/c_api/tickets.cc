// Tickets.
#include "client/c_api/tickets.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c_api/arguments.h"
#include "client/c_api/border.h"
#include "client/c_api/operation.h"
#include "client/c_api/results.h"
#include "client/kvmill_ticket.h"
#include "storage/core/status_macros.h"

namespace kvmill::c_api {
namespace {

constexpr std::size_t kTicketBytesMax = 4096;
constexpr std::size_t kConsumerBytesMax = 64;

static_assert(KVMILL_FATE_MISSED == static_cast<int>(TicketFate::kMissed) &&
              KVMILL_MISS_GIVEN_UP == static_cast<int>(TicketMiss::kGivenUp) &&
              KVMILL_MISS_CALL_ENDED == static_cast<int>(TicketMiss::kCallEnded));

absl::StatusOr<std::string> BytesOf(const kvmill_ticket& ticket) {
  if (ticket.bytes == 0 || ticket.bytes > kTicketBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ticket of ", ticket.bytes, " bytes, want 1 to ", kTicketBytesMax));
  }
  if (ticket.data == nullptr) return Null("ticket.data");
  return std::string(static_cast<const char*>(ticket.data), ticket.bytes);
}

absl::StatusOr<absl::Duration> TimeOf(absl::string_view what, std::uint64_t millis,
                                      absl::Duration most, absl::Duration standard) {
  if (millis == 0) return standard;
  if (millis <= static_cast<std::uint64_t>(absl::ToInt64Milliseconds(most))) {
    return absl::Milliseconds(millis);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, " ", millis, ", at most ", absl::ToInt64Milliseconds(most)));
}

absl::StatusOr<TicketOptions> TicketOptionsOf(const kvmill_ticket_options* in) {
  kvmill_ticket_options from;
  KVMILL_RETURN_IF_ERROR(ReadOptions("options", in, &from));
  TicketOptions to;
  if (from.consumer != nullptr) {
    to.consumer.assign(from.consumer, strnlen(from.consumer, kConsumerBytesMax + 1));
    if (to.consumer.size() > kConsumerBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("consumer is longer than ", kConsumerBytesMax, " bytes"));
    }
  }
  KVMILL_ASSIGN_OR_RETURN(to.ttl, TimeOf("ttl_ms", from.ttl_ms, kTicketTtlMax, to.ttl));
  KVMILL_ASSIGN_OR_RETURN(to.life, TimeOf("life_ms", from.life_ms, kTicketLifeMax, to.life));
  return to;
}

absl::StatusOr<std::vector<PromisedBlock>> PromisedOf(const kvmill_promised_block* blocks,
                                                      std::size_t count) {
  std::vector<PromisedBlock> made;
  const auto add = [&made](std::size_t i, const kvmill_promised_block& block) -> absl::Status {
    const std::string what = absl::StrCat("block ", i);
    PromisedBlock& to = made.emplace_back();
    KVMILL_ASSIGN_OR_RETURN(to.key, KeyOf(absl::StrCat(what, ": key"), block.key));
    if (to.key.empty()) return absl::InvalidArgumentError(absl::StrCat(what, ": key is empty"));
    KVMILL_ASSIGN_OR_RETURN(to.parent, KeyOf(absl::StrCat(what, ": parent"), block.parent));
    to.token_count = block.token_count;
    to.block_index = block.block_index;
    return absl::OkStatus();
  };
  constexpr std::size_t kLeast = offsetof(kvmill_promised_block, token_count) + sizeof(uint32_t);
  KVMILL_RETURN_IF_ERROR(ReadArray("blocks", blocks, count, kLeast, add));
  return made;
}

// Of whichever event.
absl::StatusOr<const std::vector<RedeemedBlock>*> BlocksOf(const kvmill_result* result,
                                                           const void* out) {
  if (result != nullptr && out != nullptr) {
    if (const auto* news = std::get_if<RedeemNews>(&result->value)) return &news->blocks;
  }
  KVMILL_ASSIGN_OR_RETURN(const RedeemResult* const value, ValueOf<RedeemResult>(result, out));
  return &value->blocks;
}

}  // namespace

bool RedeemProgress::Update(absl::Span<const RedeemedBlock> blocks,
                            absl::Span<const std::uint32_t> changed) {
  MutexLock lock(mu_);
  blocks_.resize(blocks.size());
  for (const std::uint32_t i : changed) blocks_[i] = blocks[i];
  changed_.insert(changed.begin(), changed.end());
  return !std::exchange(told_, true);
}

void RedeemProgress::Take(std::vector<RedeemedBlock>* blocks, std::vector<std::uint32_t>* changed) {
  MutexLock lock(mu_);
  // Whoever had no memory for it the last time takes it again, with what it has already.
  *blocks = blocks_;
  changed_.insert(changed->begin(), changed->end());
  changed->assign(changed_.begin(), changed_.end());
  changed_.clear();
  told_ = false;
}

}  // namespace kvmill::c_api

using namespace kvmill;         // NOLINT(google-build-using-namespace): the functions are C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" {

kvmill_code kvmill_create_ticket(kvmill_client* client, const kvmill_namespace* ns,
                                 const kvmill_promised_block* blocks, size_t block_count,
                                 const kvmill_ticket_options* options,
                                 const kvmill_call_options* call, kvmill_queue* queue,
                                 uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_CREATE_TICKET, client, call, queue, tag));
    KVMILL_ASSIGN_OR_RETURN(const TicketOptions to, TicketOptionsOf(options));
    KVMILL_ASSIGN_OR_RETURN(const std::vector<PromisedBlock> promised,
                            PromisedOf(blocks, block_count));
    return operation.Start<std::string>([&](const CallOptions& call_options, auto done) {
      client->client->CreateTicketAsync(ns->data->ns, promised, to, call_options, std::move(done));
    });
  });
}

kvmill_code kvmill_result_ticket(const kvmill_result* result, kvmill_ticket* ticket) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<std::string>(result, ticket);
    if (!value.ok()) return value.status();
    *ticket = {(*value)->data(), (*value)->size()};
    return absl::OkStatus();
  });
}

kvmill_code kvmill_revoke_ticket(kvmill_client* client, kvmill_ticket ticket,
                                 const kvmill_call_options* call, kvmill_queue* queue,
                                 uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_REVOKE_TICKET, client, call, queue, tag));
    KVMILL_ASSIGN_OR_RETURN(const std::string bytes, BytesOf(ticket));
    return operation.Start<std::monostate>([&](const CallOptions& options, auto done) {
      client->client->RevokeTicketAsync(bytes, options, [done](const absl::Status& s) {
        done(s.ok() ? absl::StatusOr<std::monostate>(std::monostate()) : s);
      });
    });
  });
}

kvmill_code kvmill_redeem_ticket(kvmill_client* client, const kvmill_namespace* ns,
                                 kvmill_ticket ticket, const kvmill_redeem_options* options,
                                 const kvmill_call_options* call, kvmill_queue* queue,
                                 uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_REDEEM_TICKET, client, call, queue, tag));
    kvmill_redeem_options from;
    KVMILL_RETURN_IF_ERROR(ReadOptions("options", options, &from));
    KVMILL_ASSIGN_OR_RETURN(const std::string bytes, BytesOf(ticket));
    RedeemUpdate update;
    if (from.updates != 0) {
      update = [to = queue->queue, progress = std::make_shared<RedeemProgress>(), tag](
                   absl::Span<const RedeemedBlock> blocks,
                   absl::Span<const std::uint32_t> changed) {
        if (!progress->Update(blocks, changed)) return;
        auto news = std::make_unique<kvmill_result>();
        news->operation = KVMILL_REDEEM_UPDATE;
        news->tag = tag;
        news->value = RedeemNews{progress, {}, {}};
        to->Add(std::move(news));
      };
    }
    return operation.StartBoth<RedeemResult>([&](const CallOptions& call_options, auto done) {
      client->client->RedeemTicketAsync(ns->data->ns, bytes, std::move(update), call_options,
                                        std::move(done));
    });
  });
}

kvmill_code kvmill_cancel_redeem(kvmill_client* client, kvmill_ticket ticket) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Null("client");
    KVMILL_RETURN_IF_ERROR(CheckProcess(client->pid));
    KVMILL_ASSIGN_OR_RETURN(const std::string bytes, BytesOf(ticket));
    client->client->CancelRedeem(bytes);
    return absl::OkStatus();
  });
}

kvmill_code kvmill_result_redeem(const kvmill_result* result, kvmill_redeem_result* redeem) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const std::vector<RedeemedBlock>* const blocks,
                            BlocksOf(result, redeem));
    kvmill_redeem_result to = {};
    to.block_count = blocks->size();
    to.missed = static_cast<std::uint64_t>(std::count_if(
        blocks->begin(), blocks->end(),
        [](const RedeemedBlock& block) { return block.fate == TicketFate::kMissed; }));
    if (const auto* news = std::get_if<RedeemNews>(&result->value)) {
      to.changed = news->changed.data();
      to.changed_count = news->changed.size();
    }
    return WriteStruct("redeem", to, redeem);
  });
}

const char* kvmill_miss_name(uint32_t miss) {
  return miss <= KVMILL_MISS_CALL_ENDED ? NameOf(static_cast<TicketMiss>(miss)).data() : "unknown";
}

kvmill_code kvmill_result_redeemed_block(const kvmill_result* result, size_t index,
                                         kvmill_redeemed_block* block) {
  return Guard([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const std::vector<RedeemedBlock>* const blocks,
                            BlocksOf(result, block));
    if (index >= blocks->size()) return OutOfRange("block", index, blocks->size());
    const RedeemedBlock& from = (*blocks)[index];
    kvmill_redeemed_block to = {};
    to.key = {from.key.data(), from.key.size()};
    to.layer_words = from.layer_words.data();
    to.layer_word_count = from.layer_words.size();
    to.group = from.group;
    to.block_index = from.block_index;
    to.token_count = from.token_count;
    to.layer_count = from.layer_count;
    to.layers_here = from.layers_here;
    to.fate = static_cast<std::uint32_t>(from.fate);
    to.miss = static_cast<std::uint32_t>(from.miss);
    return WriteStruct("block", to, block);
  });
}

}  // extern "C"
