#include "service/event_publisher.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

// Of one message; a part of the journal has at most as many.
constexpr std::size_t kBlocksPerMessage = 512;
// Messages for one that asked for a replay wait for it: a whole replay, and some more.
constexpr int kReplayQueueMore = 1024;
// Unsent messages at the end.
constexpr int kLingerMs = 500;
// Of a part that somebody sends: a subscription's topic, or a request.
constexpr std::int64_t kReceivedBytesMax = 256;
constexpr std::int64_t kWarningEveryNanos = 10'000'000'000;

absl::StatusOr<std::string> Bind(zmq::socket_t& socket, const char* option,
                                 const HostPort& address) {
  try {
    socket.set(zmq::sockopt::ipv6, address.is_ipv6());
    socket.bind(absl::StrCat("tcp://", address.ToString()));
    return socket.get(zmq::sockopt::last_endpoint);
  } catch (const zmq::error_t& error) {
    return absl::UnavailableError(absl::StrCat("--", option, " ", address.ToString(),
                                               ": cannot listen there: ", error.what()));
  }
}

}  // namespace

class EventPublisher::Impl {
 public:
  Impl(const Options& options, EventJournal& journal, const TieredStore& store, const Clock& clock)
      : options_(options),
        journal_(journal),
        store_(store),
        clock_(clock),
        wake_(std::make_shared<Descriptor>(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC))) {}
  ~Impl() {
    stopping_.store(true, std::memory_order_release);
    wake_->Wake();
    if (thread_.joinable()) thread_.join();
    if (reader_ != nullptr) journal_.Close(reader_);
    // Closed by their destructors, and the context then waits for what lingers.
  }

  absl::Status Start();

  std::string address, replay_address;

 private:
  struct Kept {
    std::uint64_t sequence = 0;
    zmq::message_t payload;
  };
  struct Descriptor {
    explicit Descriptor(int of) : fd(of) {}
    ~Descriptor() { close(fd); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    void Wake() const {
      const std::uint64_t one = 1;
      static_cast<void>(!write(fd, &one, sizeof(one)));
    }
    const int fd;
  };

  void Run();
  // False: the journal has ended.
  bool Pump();
  void PublishPart(EventJournal::Part& part);
  // What a reader knew is void; these are here.
  void PublishAll(const std::vector<BlockEvent>& blocks);
  // Everything that is here now, whatever happened before.
  void PublishPresent();
  void Publish(const std::vector<WireEvent>& events);
  std::string Pack(const std::vector<WireEvent>& events) const {
    return PackEvents(static_cast<double>(clock_.UnixMillis()) / 1000.0, events, options_.hashes);
  }
  std::vector<WireEvent> ToWire(absl::Span<const BlockEvent> events) {
    return ToWireEvents(events, [this](NamespaceId id) { return NamespaceOf(id); });
  }
  WireNamespace NamespaceOf(NamespaceId id) { return Published(id).wire; }
  struct Space {
    WireNamespace wire;
    bool is_published = false;
  };
  Space Published(NamespaceId id);
  void LeaveOut(std::vector<BlockEvent>* events) {
    if (options_.namespace_name.empty()) return;
    std::erase_if(*events, [this](const BlockEvent& event) {
      return !Published(event.namespace_id).is_published;
    });
  }

  void AnswerRequest();
  void Replay(const zmq::message_t& client, std::uint64_t first);
  void ReplayPresent(const zmq::message_t& client, std::uint64_t first);
  // False: the journal has ended.
  bool PackPresent(std::uint64_t first);
  void Answer(const zmq::message_t& client, const std::string& sequence, zmq::message_t payload);

  const Options options_;
  EventJournal& journal_;
  const TieredStore& store_;
  const Clock& clock_;
  std::atomic<bool> stopping_{false};

  // An eventfd. Shared: the journal may still be waking while this ends.
  const std::shared_ptr<const Descriptor> wake_;
  // Of the thread, once it runs.
  zmq::context_t context_{1};
  zmq::socket_t pub_{context_, zmq::socket_type::pub};
  zmq::socket_t router_{context_, zmq::socket_type::router};
  EventJournal::ReaderPtr reader_;
  absl::flat_hash_map<NamespaceId, Space> namespaces_;
  std::uint64_t next_sequence_ = 0;
  std::deque<Kept> kept_;
  std::size_t kept_bytes_ = 0;
  std::vector<zmq::message_t> present_;  // What is here, until something is published.
  std::int64_t last_warning_nanos_ = 0;
  std::thread thread_;
};

absl::Status EventPublisher::Impl::Start() {
  if (wake_->fd < 0) return absl::InternalError("eventfd gave no descriptor");
  pub_.set(zmq::sockopt::sndhwm, static_cast<int>(options_.high_water_mark));
  pub_.set(zmq::sockopt::linger, kLingerMs);
  router_.set(zmq::sockopt::linger, kLingerMs);
  for (zmq::socket_t* socket : {&pub_, &router_}) {
    socket->set(zmq::sockopt::maxmsgsize, kReceivedBytesMax);
  }
  router_.set(zmq::sockopt::sndhwm, static_cast<int>(options_.buffer_steps) + kReplayQueueMore);
  absl::StatusOr<std::string> bound = Bind(pub_, "events", options_.address);
  if (!bound.ok()) return bound.status();
  address = *std::move(bound);
  if (options_.replay.has_value()) {
    bound = Bind(router_, "events-replay", *options_.replay);
    if (!bound.ok()) return bound.status();
    replay_address = *std::move(bound);
  }
  absl::StatusOr<EventJournal::ReaderPtr> reader = journal_.Open(
      options_.tenant, {.snapshot = true, .exact = true}, [wake = wake_] { wake->Wake(); });
  if (!reader.ok()) return reader.status();
  reader_ = *std::move(reader);
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void EventPublisher::Impl::Run() {
  while (!stopping_.load(std::memory_order_acquire)) {
    try {
      if (!Pump()) return;
      zmq::pollitem_t items[] = {{nullptr, wake_->fd, ZMQ_POLLIN, 0},
                                 {router_.handle(), 0, ZMQ_POLLIN, 0}};
      zmq::poll(items, replay_address.empty() ? 1 : 2, std::chrono::milliseconds(-1));
      std::uint64_t count = 0;
      static_cast<void>(!read(wake_->fd, &count, sizeof(count)));
      // One, then what happened meanwhile: who keeps asking stops nothing.
      if ((items[1].revents & ZMQ_POLLIN) != 0) AnswerRequest();
    } catch (const zmq::error_t& error) {
      if (error.num() == EINTR) continue;
      LogError(
          absl::StrCat("events: ZeroMQ failed, nothing is published any more: ", error.what()));
      return;
    }
  }
}

bool EventPublisher::Impl::Pump() {
  for (;;) {
    EventJournal::Part part;
    const absl::StatusOr<bool> some = journal_.Next(*reader_, &part);
    if (!some.ok()) return false;
    if (!*some) return true;
    PublishPart(part);
  }
}

void EventPublisher::Impl::PublishPart(EventJournal::Part& part) {
  LeaveOut(&part.events);
  if (part.what == EventJournal::Part::What::kSnapshotBegin) return PublishAll(part.events);
  const auto cleared = std::find_if(
      part.events.begin(), part.events.end(),
      [](const BlockEvent& event) { return event.kind == BlockEvent::Kind::kCleared; });
  const absl::Span<const BlockEvent> events(part.events);
  Publish(ToWire(events.first(static_cast<std::size_t>(cleared - part.events.begin()))));
  // What is cleared to these readers is everything, whereas this was one namespace.
  if (cleared != part.events.end()) PublishPresent();
}

void EventPublisher::Impl::PublishPresent() {
  std::vector<BlockEvent> blocks;
  while (!journal_.SnapshotAtEnd(*reader_, &blocks)) {
    EventJournal::Part passed_over;
    const absl::StatusOr<bool> some = journal_.Next(*reader_, &passed_over);
    if (!some.ok()) return;
    if (passed_over.what == EventJournal::Part::What::kSnapshotBegin) {
      LeaveOut(&passed_over.events);
      return PublishAll(passed_over.events);
    }
  }
  LeaveOut(&blocks);
  PublishAll(blocks);
}

void EventPublisher::Impl::PublishAll(const std::vector<BlockEvent>& blocks) {
  const absl::Span<const BlockEvent> all(blocks);
  std::size_t begin = 0;
  do {
    const absl::Span<const BlockEvent> some = all.subspan(begin, kBlocksPerMessage);
    std::vector<WireEvent> events = ToWire(some);
    if (begin == 0) events.insert(events.begin(), WireEvent());
    Publish(events);
    begin += some.size();
  } while (begin < all.size());
}

void EventPublisher::Impl::Publish(const std::vector<WireEvent>& events) {
  if (events.empty()) return;
  present_.clear();
  Kept message;
  message.sequence = next_sequence_++;
  const std::string payload = Pack(events);
  message.payload.rebuild(payload.data(), payload.size());
  pub_.send(zmq::buffer(options_.topic), zmq::send_flags::sndmore);
  pub_.send(zmq::buffer(PackSequence(message.sequence)), zmq::send_flags::sndmore);
  zmq::message_t shared;
  shared.copy(message.payload);
  pub_.send(std::move(shared), zmq::send_flags::none);
  kept_bytes_ += payload.size();
  kept_.push_back(std::move(message));
  while (kept_.size() > options_.buffer_steps ||
         (kept_bytes_ > options_.buffer_bytes && kept_.size() > 1)) {
    kept_bytes_ -= kept_.front().payload.size();
    kept_.pop_front();
  }
}

EventPublisher::Impl::Space EventPublisher::Impl::Published(NamespaceId id) {
  const auto known = namespaces_.find(id);
  if (known != namespaces_.end()) return known->second;
  const auto info = store_.FindNamespace(id);
  if (!info.ok()) return {};
  const bool is_published =
      options_.namespace_name.empty() || info->name == options_.namespace_name;
  return namespaces_[id] = {{info->spec.block_tokens, info->spec.adapter_digest}, is_published};
}

// --- Replay ---

void EventPublisher::Impl::AnswerRequest() {
  // Of more parts than a request has the number is all that is kept.
  zmq::message_t parts[3];
  std::size_t count = 0;
  for (bool more = true; more; ++count) {
    zmq::message_t part;
    if (!router_.recv(part, zmq::recv_flags::dontwait).has_value()) return;
    more = part.more();
    if (count < 3) parts[count].swap(part);
  }
  if (count != 3 || parts[1].size() != 0 || parts[2].size() != 8) {
    const std::int64_t now_nanos = clock_.MonotonicNanos();
    if (last_warning_nanos_ == 0 || now_nanos - last_warning_nanos_ > kWarningEveryNanos) {
      last_warning_nanos_ = now_nanos;
      LogWarning(absl::StrCat("events: a request for a replay has ", count - 1,
                              " parts: want an empty one and one of 8 bytes"));
    }
    return;
  }
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    first = first << 8 | static_cast<unsigned char>(parts[2].data<char>()[i]);
  }
  Replay(parts[0], first);
}

void EventPublisher::Impl::Replay(const zmq::message_t& client, std::uint64_t first) {
  if (!kept_.empty() && first < kept_.front().sequence) {
    ReplayPresent(client, first);
  } else {
    for (Kept& message : kept_) {
      if (message.sequence < first) continue;
      zmq::message_t shared;
      shared.copy(message.payload);
      Answer(client, PackSequence(message.sequence), std::move(shared));
    }
  }
  Answer(client, PackSequence(~std::uint64_t{0}), zmq::message_t());  // -1.
}

bool EventPublisher::Impl::PackPresent(std::uint64_t first) {
  const auto messages_max = [this, first] {
    return static_cast<std::size_t>(
        std::min<std::uint64_t>(next_sequence_ - 1 - first, options_.buffer_steps));
  };
  if (!present_.empty() && present_.size() <= messages_max()) return true;
  std::vector<BlockEvent> blocks;
  while (!journal_.SnapshotAtEnd(*reader_, &blocks)) {
    if (!Pump()) return false;
  }
  LeaveOut(&blocks);
  // `first` is not kept, so what it stands for are more messages than one. As many of them are
  // stood for as it takes, and less than were asked for, so that a gap shows.
  present_.clear();
  const std::size_t most = messages_max();
  const std::size_t per_message = std::max(kBlocksPerMessage, (blocks.size() + most - 1) / most);
  const std::size_t messages =
      std::max<std::size_t>(1, (blocks.size() + per_message - 1) / per_message);
  const absl::Span<const BlockEvent> all(blocks);
  for (std::size_t i = 0; i < messages; ++i) {
    std::vector<WireEvent> events = ToWire(all.subspan(i * per_message, per_message));
    if (i == 0) events.insert(events.begin(), WireEvent());
    const std::string payload = Pack(events);
    present_.emplace_back(payload.data(), payload.size());
  }
  return true;
}

void EventPublisher::Impl::ReplayPresent(const zmq::message_t& client, std::uint64_t first) {
  if (!PackPresent(first)) return;
  std::uint64_t sequence = next_sequence_ - present_.size();
  for (zmq::message_t& payload : present_) {
    zmq::message_t shared;
    shared.copy(payload);
    Answer(client, PackSequence(sequence++), std::move(shared));
  }
}

void EventPublisher::Impl::Answer(const zmq::message_t& client, const std::string& sequence,
                                  zmq::message_t payload) {
  router_.send(zmq::buffer(client.data(), client.size()), zmq::send_flags::sndmore);
  router_.send(zmq::const_buffer(), zmq::send_flags::sndmore);
  if (options_.replay_topic) {
    router_.send(zmq::buffer(options_.topic), zmq::send_flags::sndmore);
  }
  router_.send(zmq::buffer(sequence), zmq::send_flags::sndmore);
  router_.send(std::move(payload), zmq::send_flags::none);
}

EventPublisher::EventPublisher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
EventPublisher::~EventPublisher() = default;
const std::string& EventPublisher::address() const { return impl_->address; }
const std::string& EventPublisher::replay_address() const { return impl_->replay_address; }

absl::StatusOr<std::unique_ptr<EventPublisher>> EventPublisher::Start(const Options& options,
                                                                      EventJournal& journal,
                                                                      const TieredStore& store,
                                                                      const Clock& clock) {
  try {
    auto impl = std::make_unique<Impl>(options, journal, store, clock);
    if (absl::Status started = impl->Start(); !started.ok()) return started;
    return std::unique_ptr<EventPublisher>(new EventPublisher(std::move(impl)));
  } catch (const zmq::error_t& error) {
    return absl::InternalError(absl::StrCat("events: ZeroMQ: ", error.what()));
  }
}

}  // namespace kvmill
