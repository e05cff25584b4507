#include "client/ticket_pages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/data_operation.h"
#include "client/server_stream.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

absl::Status Malformed(absl::string_view what, std::uint64_t got, std::uint64_t want) {
  return absl::DataLossError(
      absl::StrCat("malformed pages of a ticket: ", what, " ", got, ", want ", want));
}

// Of one answer: far more than honest peers send of copies that were given up meanwhile.
constexpr std::uint64_t kDroppedBytesMax = std::uint64_t{256} << 20;

// Memory for the pages of an answer; that of those that the sink drops is its own.
class PagePlaces {
 public:
  PagePlaces(TicketPageSink& sink, std::size_t page_count) : sink_(sink), page_count_(page_count) {}

  // `payload_bytes`: what comes behind the head, where that is known before.
  absl::Status Place(const v1::TicketPages& head,
                     std::optional<std::uint64_t> payload_bytes = std::nullopt) {
    const auto count = static_cast<std::size_t>(head.page_bytes_size());
    if (count != page_count_) return Malformed("pages", count, page_count_);
    for (const std::uint32_t bytes : head.page_bytes()) {
      if (bytes == 0 || bytes > kTicketPageBytesMax) {
        return Malformed("page of", bytes, kTicketPageBytesMax);
      }
      bytes_ += bytes;
    }
    if (payload_bytes.has_value() && bytes_ != *payload_bytes) {
      return Malformed("payload", *payload_bytes, bytes_);
    }
    std::size_t page = 0;
    std::uint64_t dropped = 0;
    for (const std::uint32_t bytes : head.page_bytes()) {
      absl::Span<std::byte> memory = sink_.PageMemory(page++, bytes);
      if (memory.size() != bytes) {
        dropped += bytes;
        if (dropped > kDroppedBytesMax)
          return Malformed("dropped bytes", dropped, kDroppedBytesMax);
        // Not touched before something comes: a peer that only says so costs nothing.
        own_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
        memory = absl::MakeSpan(own_.back().get(), bytes);
      }
      spans_.push_back(memory);
    }
    return absl::OkStatus();
  }
  std::uint64_t bytes() const { return bytes_; }
  const DestinationSpans& spans() const { return spans_; }

 private:
  TicketPageSink& sink_;
  const std::size_t page_count_;
  std::uint64_t bytes_ = 0;
  DestinationSpans spans_;
  std::vector<std::unique_ptr<std::byte[]>> own_;
};

struct Nothing {};

class DataTicketRead final : public DataOperation<Nothing> {
 public:
  DataTicketRead(DataLink& link, ConnectionPtr connection, const TicketPagesRequest& request,
                 TicketPageSink& sink, Deadline deadline, Done done)
      : DataOperation(link, std::move(connection), deadline, std::move(done)),
        places_(sink, request.page_count) {
    *request_.mutable_ticket() = request.request;
    sink.ComesBy(this->connection()->info().transport);
  }

  void Start() {
    Call call;
    call.place = [this](const ResponseHead& head, DestinationSpans* spans) {
      v1::TicketPages pages;
      if (!pages.ParseFromArray(head.header.data(), static_cast<int>(head.header.size()))) {
        return absl::DataLossError("malformed pages of a ticket: their header does not parse");
      }
      KVMILL_RETURN_IF_ERROR(places_.Place(pages, head.payload_bytes));
      *spans = places_.spans();
      return absl::OkStatus();
    };
    call.done = [this](const absl::StatusOr<Response>& response) {
      {
        MutexLock lock(mu_);
        if (!response.ok()) Fail(response.status());
        // There is no page without bytes: an answer that was not placed has none.
        if (response.ok() && places_.spans().empty()) Fail(Malformed("payload", 0, 1));
      }
      // Not here: whoever is told may start calls, and this is the transport's thread.
      link().workers().Post([this] { End(Nothing()); });
    };
    StartCall(&request_, std::move(call));
  }

 private:
  v1::DataRequest request_;
  PagePlaces places_;
};

class TicketReadStream final : public ServerStream<v1::TicketPages> {
 public:
  TicketReadStream(Connection& connection, const TicketPagesRequest& request, TicketPageSink& sink,
                   std::function<void(absl::Status)> done)
      : ServerStream(connection),
        request_(request.request),
        places_(sink, request.page_count),
        done_(std::move(done)) {
    sink.ComesBy("grpc");
  }

 private:
  Reader Prepare(Channel& channel, grpc::ClientContext* context,
                 grpc::CompletionQueue* queue) override {
    return channel.peer->PrepareAsyncReadTicket(context, request_, queue);
  }

  absl::StatusOr<bool> Take(const v1::TicketPages& pages) override {
    if (places_.spans().empty()) KVMILL_RETURN_IF_ERROR(places_.Place(pages));
    absl::string_view bytes = pages.bytes();
    while (!bytes.empty()) {
      if (page_ == places_.spans().size()) return Malformed("bytes", bytes.size(), 0);
      const absl::Span<std::byte> rest = places_.spans()[page_].subspan(offset_);
      const std::size_t count = std::min(rest.size(), bytes.size());
      std::memcpy(rest.data(), bytes.data(), count);
      bytes.remove_prefix(count);
      offset_ += count;
      if (count == rest.size()) {
        ++page_;
        offset_ = 0;
      }
    }
    return true;
  }

  void Ended(const absl::Status& status) override {
    const bool whole = !places_.spans().empty() && page_ == places_.spans().size();
    done_(status.ok() && !whole ? Malformed("pages", page_, places_.spans().size()) : status);
  }

  const v1::ReadTicketRequest request_;
  PagePlaces places_;
  const std::function<void(absl::Status)> done_;
  std::size_t page_ = 0, offset_ = 0;  // Where the next byte goes.
};

}  // namespace

void StartDataTicketRead(DataLink& link, ConnectionPtr connection,
                         const TicketPagesRequest& request, TicketPageSink& sink,
                         DataLink::Deadline deadline, std::function<void(absl::Status)> done) {
  // Deletes itself after `done`.
  (new DataTicketRead(
       link, std::move(connection), request, sink, deadline,
       [done = std::move(done)](const absl::StatusOr<Nothing>& read) { done(read.status()); }))
      ->Start();
}

void StartTicketReadStream(Connection& connection, const TicketPagesRequest& request,
                           TicketPageSink& sink, Connection::Deadline deadline,
                           std::function<void(absl::Status)> done) {
  // Deletes itself after `done`.
  (new TicketReadStream(connection, request, sink, std::move(done)))->Start(deadline);
}

}  // namespace kvmill
