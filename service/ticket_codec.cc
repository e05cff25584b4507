#include "service/ticket_codec.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/ticket_pages.h"
#include "service/cluster/registration.h"
#include "service/peer_codec.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kBearerVersion = 1;

std::string Bytes(const TicketSecret& secret) {
  return std::string(reinterpret_cast<const char*>(secret.data()), secret.size());
}

absl::StatusOr<TicketSecret> SecretFromBytes(absl::string_view bytes) {
  TicketSecret secret{};
  if (bytes.size() != secret.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ticket's secret of ", bytes.size(), " bytes: want ", secret.size()));
  }
  std::copy(bytes.begin(), bytes.end(), secret.begin());
  return secret;
}

void ToProto(const TicketBlock& block, v1::TicketBlock* out) {
  out->set_key(std::string(block.key.view()));
  out->set_group(block.group);
  out->set_layer_count(block.layer_count);
  out->set_parent(std::string(block.parent.view()));
  out->set_token_count(block.token_count);
  out->set_block_index(block.block_index);
  out->set_tail_key(std::string(block.tail_key.view()));
}

absl::StatusOr<TicketBlock> FromProto(const v1::TicketBlock& from) {
  TicketBlock block;
  KVMILL_ASSIGN_OR_RETURN(block.key, BlockKey::FromBytes(from.key()));
  KVMILL_ASSIGN_OR_RETURN(block.parent, OptionalKeyFromBytes(from.parent()));
  KVMILL_ASSIGN_OR_RETURN(block.tail_key, OptionalKeyFromBytes(from.tail_key()));
  if (from.group() > 255 || from.layer_count() > kLayersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer group ", from.group(), " with ", from.layer_count(), " layers"));
  }
  block.group = static_cast<std::uint8_t>(from.group());
  block.layer_count = static_cast<std::uint16_t>(from.layer_count());
  block.token_count = from.token_count();
  block.block_index = from.block_index();
  return block;
}

absl::StatusOr<TicketNews> NewsFromProto(const v1::AskTicketReply& reply) {
  TicketNews news;
  news.version = reply.version();
  KVMILL_ASSIGN_OR_RETURN(news.fingerprint, FingerprintFromBytes(reply.fingerprint()));
  if (static_cast<std::size_t>(reply.blocks_size()) > kTicketBlocksMax ||
      static_cast<std::size_t>(reply.changed_size()) > kTicketBlocksMax) {
    return absl::InvalidArgumentError(absl::StrCat(reply.blocks_size(), " blocks"));
  }
  for (const v1::TicketBlock& block : reply.blocks()) {
    KVMILL_ASSIGN_OR_RETURN(news.blocks.emplace_back(), FromProto(block));
  }
  for (const v1::TicketBlockNews& from : reply.changed()) {
    TicketBlockNews& change = news.changed.emplace_back();
    change.block = from.block();
    if (!v1::TicketBlockState_IsValid(from.state())) {
      return absl::InvalidArgumentError(absl::StrCat("state ", static_cast<int>(from.state())));
    }
    change.state = static_cast<TicketBlockState>(from.state());
    const std::optional<LayerSet> finished = LayerSet::FromWords(from.finished());
    if (!finished.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(from.finished_size(), " words of layers"));
    }
    change.finished = *finished;
    change.digest = from.digest();
  }
  return news;
}

}  // namespace

std::string Serialize(const TicketBearer& bearer) {
  v1::TicketBearer out;
  out.set_version(kBearerVersion);
  out.set_secret(Bytes(bearer.secret));
  out.set_producer(bearer.producer);
  out.set_incarnation(bearer.incarnation);
  out.set_fingerprint(std::string(AsBytes(bearer.fingerprint)));
  return out.SerializeAsString();
}

absl::StatusOr<TicketBearer> ParseTicket(absl::string_view bytes) {
  v1::TicketBearer from;
  if (!from.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) || from.version() == 0) {
    return absl::InvalidArgumentError(absl::StrCat("these ", bytes.size(), " bytes are no ticket"));
  }
  if (from.version() != kBearerVersion) {
    return absl::FailedPreconditionError(absl::StrCat("a ticket of version ", from.version(),
                                                      ": this daemon knows ", kBearerVersion));
  }
  TicketBearer bearer;
  KVMILL_ASSIGN_OR_RETURN(bearer.secret, SecretFromBytes(from.secret()));
  KVMILL_ASSIGN_OR_RETURN(const Member producer, HolderOf(from.producer(), from.incarnation()));
  bearer.producer = producer.id;
  bearer.incarnation = producer.incarnation;
  KVMILL_ASSIGN_OR_RETURN(bearer.fingerprint, FingerprintFromBytes(from.fingerprint()));
  return bearer;
}

absl::StatusOr<std::vector<TicketBlock>> BlocksFromProto(const v1::CreateTicketRequest& request,
                                                         const NamespaceSpec& spec) {
  std::vector<TicketBlock> blocks;
  for (const v1::PromisedBlock& promised : request.blocks()) {
    if (blocks.size() + spec.groups.size() > kTicketBlocksMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("a ticket of ", request.blocks_size(), " blocks of ", spec.groups.size(),
                       " layer groups: at most ", kTicketBlocksMax, " of both"));
    }
    TicketBlock block;
    KVMILL_ASSIGN_OR_RETURN(const BlockKey key, BlockKey::FromBytes(promised.key()));
    KVMILL_ASSIGN_OR_RETURN(block.parent, OptionalKeyFromBytes(promised.parent()));
    block.token_count = promised.token_count();
    block.block_index = promised.block_index();
    block.key = StoredKey(spec.block_tokens, block.parent, block.token_count, key);
    if (block.token_count < spec.block_tokens) block.tail_key = key;
    for (std::size_t group = 0; group < spec.groups.size(); ++group) {
      block.group = static_cast<std::uint8_t>(group);
      block.layer_count = static_cast<std::uint16_t>(spec.groups[group].layers.size());
      blocks.push_back(block);
    }
  }
  return blocks;
}

void ToProto(const TicketName& name, const Member& consumer, v1::TicketHolder* out) {
  out->set_secret(Bytes(name.secret));
  out->set_fingerprint(std::string(AsBytes(name.fingerprint)));
  out->set_consumer(consumer.id);
  out->set_consumer_incarnation(consumer.incarnation);
}

absl::StatusOr<TicketHolder> FromProto(const v1::TicketHolder& from) {
  TicketHolder holder;
  KVMILL_ASSIGN_OR_RETURN(holder.secret, SecretFromBytes(from.secret()));
  KVMILL_ASSIGN_OR_RETURN(const Member consumer,
                          HolderOf(from.consumer(), from.consumer_incarnation()));
  holder.consumer = {consumer.id, consumer.incarnation};
  if (!from.fingerprint().empty()) {
    KVMILL_ASSIGN_OR_RETURN(holder.fingerprint, FingerprintFromBytes(from.fingerprint()));
  }
  return holder;
}

absl::StatusOr<std::vector<TicketPiece>> PiecesFromProto(const v1::ReadTicketRequest& request) {
  if (static_cast<std::size_t>(request.pieces_size()) > kTicketPagesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.pieces_size(), " pieces of a ticket: want at most ", kTicketPagesMax));
  }
  std::vector<TicketPiece> pieces;
  std::size_t pages = 0;
  for (const v1::TicketPiece& from : request.pieces()) {
    if (from.layers().empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("no layers of block ", from.block(), " of a ticket"));
    }
    TicketPiece& piece = pieces.emplace_back();
    piece.block = from.block();
    std::uint32_t next = 0;
    for (const std::uint32_t layer : from.layers()) {
      if (layer < next || layer >= kLayersMax) {
        return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " of block ", from.block(),
                                                       " of a ticket: want ", next, " to ",
                                                       kLayersMax - 1));
      }
      piece.layers.Add(layer);
      next = layer + 1;
      ++pages;
    }
    if (pages > kTicketPagesMax) break;
  }
  if (pages == 0 || pages > kTicketPagesMax) {
    return absl::InvalidArgumentError(absl::StrCat("a request for ", pages == 0 ? "no" : "more",
                                                   " pages of a ticket: want 1 to ",
                                                   kTicketPagesMax));
  }
  return pieces;
}

void AddPiece(std::uint32_t block, const LayerSet& layers, v1::ReadTicketRequest* out) {
  v1::TicketPiece* piece = out->add_pieces();
  piece->set_block(block);
  for (std::uint32_t layer = 0; layer < layers.end(); ++layer) {
    if (layers.Has(layer)) piece->add_layers(layer);
  }
}

void ToProto(const absl::StatusOr<TicketNews>& news, v1::AskTicketReply* out) {
  ToProto(news.status(), out->mutable_ended());
  out->set_end(static_cast<v1::TicketEnd>(EndOf(news.status())));
  if (!news.ok()) return;
  out->set_version(news->version);
  out->set_fingerprint(std::string(AsBytes(news->fingerprint)));
  for (const TicketBlock& block : news->blocks) ToProto(block, out->add_blocks());
  for (const TicketBlockNews& change : news->changed) {
    v1::TicketBlockNews* to = out->add_changed();
    to->set_block(change.block);
    to->set_state(static_cast<v1::TicketBlockState>(change.state));
    for (const std::uint64_t word : change.finished.words()) to->add_finished(word);
    to->set_digest(change.digest);
  }
}

absl::StatusOr<TicketNews> FromProto(const v1::AskTicketReply& reply) {
  const absl::Status ended = FromProto(reply.ended());
  if (absl::IsAborted(ended) && v1::TicketEnd_IsValid(reply.end())) {
    return TicketEndedError(static_cast<TicketEnd>(reply.end()));
  }
  KVMILL_RETURN_IF_ERROR(ended);
  absl::StatusOr<TicketNews> news = NewsFromProto(reply);
  if (news.ok()) return news;
  return absl::DataLossError(absl::StrCat("an answer about a ticket: ", news.status().message()));
}

void ToProto(std::uint32_t place, const TicketRedeem::Block& block, bool first,
             v1::RedeemedBlock* out) {
  out->set_block(place);
  out->set_fate(static_cast<v1::TicketFate>(block.fate));
  out->set_miss(static_cast<v1::TicketMiss>(block.miss));
  for (const std::uint64_t word : block.here.words()) out->add_layers(word);
  if (first) ToProto(block.what, out->mutable_what());
}

}  // namespace kvmill
