#include "service/etcd/etcd_watch.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/etcd/etcd_errors.h"

namespace kvmill {

std::string EndOfPrefix(std::string prefix) {
  while (!prefix.empty() && static_cast<unsigned char>(prefix.back()) == 0xff) prefix.pop_back();
  if (prefix.empty()) return std::string(1, '\0');
  prefix.back() = static_cast<char>(static_cast<unsigned char>(prefix.back()) + 1);
  return prefix;
}

EtcdWatch::EtcdWatch(Loop& loop, std::shared_ptr<LoopInbox> inbox, Options options)
    : loop_(loop),
      inbox_(std::move(inbox)),
      prefix_(std::move(options.prefix)),
      silence_nanos_(options.silence_nanos),
      next_revision_(options.from_revision),
      calls_(std::make_shared<const Registry::WatchCalls>(std::move(options.calls))) {}

void EtcdWatch::Begin() { Heard(); }

void EtcdWatch::Open(EtcdServer& server, std::shared_ptr<grpc::ClientContext> context) {
  if (calls_ == nullptr) return;
  server_ = server.name;
  inbox_->Begin();
  // gRPC's threads hold the stream, not the watch: what they post finds it gone when it is.
  const std::weak_ptr<EtcdWatch> weak = weak_from_this();
  const auto post = [inbox = inbox_, weak](std::function<void(EtcdWatch&)> task) {
    inbox->Post([weak, task = std::move(task)] {
      if (const std::shared_ptr<EtcdWatch> watch = weak.lock()) task(*watch);
    });
  };
  Stream::Calls calls;
  calls.read = [post](bool ok) { post([ok](EtcdWatch& watch) { watch.Read(ok); }); };
  calls.wrote = [post](bool) { post([](EtcdWatch& watch) { watch.writing_ = false; }); };
  calls.ended = [post, inbox = inbox_, tls = server.tls](const grpc::Status& status) {
    post([status, tls](EtcdWatch& watch) {
      const absl::Status error = FromEtcd(status, watch.server_, tls);
      watch.Break(!error.ok() ? error
                              : absl::UnavailableError(absl::StrCat("etcd ", watch.server_,
                                                                    ": ended the watch's stream")));
    });
    inbox->End();
  };
  stream_ = Stream::Begin(std::move(context), std::move(calls),
                          [&server](grpc::ClientContext* call, auto* reactor) {
                            server.watch->async()->Watch(call, reactor);
                          });
  etcdserverpb::WatchRequest request;
  etcdserverpb::WatchCreateRequest& create = *request.mutable_create_request();
  create.set_key(prefix_);
  create.set_range_end(EndOfPrefix(prefix_));
  // One earlier than wanted: since 3.4.25 etcd answers no question for progress before the store
  // has reached the watch's first revision. Deliver leaves out what is known.
  create.set_start_revision(std::max<Registry::Revision>(1, next_revision_ - 1));
  writing_ = true;
  stream_->Read();
  stream_->Write(std::move(request));
}

void EtcdWatch::Heard() {
  if (silence_timer_ != 0) loop_.Cancel(silence_timer_);
  silence_timer_ = loop_.After(silence_nanos_, [this] {
    silence_timer_ = 0;
    Break(absl::DeadlineExceededError(absl::StrCat("etcd ", server_, ": a watch heard nothing for ",
                                                   silence_nanos_ / 1'000'000, " ms")));
  });
}

void EtcdWatch::AskForProgress() {
  progress_timer_ = loop_.After(silence_nanos_ / 3, [this] {
    AskForProgress();
    if (std::exchange(writing_, true)) return;  // It is not even read: the silence will tell.
    etcdserverpb::WatchRequest request;
    request.mutable_progress_request();
    stream_->Write(std::move(request));
  });
}

void EtcdWatch::Read(bool ok) {
  if (calls_ == nullptr) return;
  if (!ok) {
    // Nothing may be written to a stream that was released.
    if (progress_timer_ != 0) loop_.Cancel(std::exchange(progress_timer_, 0));
    stream_->Release();  // Then it ends, and says why.
    return;
  }
  Heard();
  const std::shared_ptr<EtcdWatch> self = shared_from_this();
  const std::shared_ptr<Stream> stream = stream_;
  if (Handle(stream->response()) && calls_ != nullptr) stream->Read();
}

bool EtcdWatch::Handle(const etcdserverpb::WatchResponse& response) {
  if (response.canceled()) {
    if (response.compact_revision() > 0) {
      const Registry::Revision revision = response.compact_revision();
      const Calls calls = EndedBy(absl::OkStatus());
      calls->compacted(revision);
    } else {
      Break(FromCancelReason(response.cancel_reason(), server_));
    }
    return false;
  }
  if (started_ && response.header().cluster_id() != cluster_id_) {
    Break(absl::AbortedError(absl::StrCat("etcd ", server_, ": answers for cluster ",
                                          absl::Hex(response.header().cluster_id()), " and for ",
                                          absl::Hex(cluster_id_), " on one stream")));
    return false;
  }
  if (response.created()) {
    started_ = true;
    cluster_id_ = response.header().cluster_id();
    AskForProgress();
    const Calls calls = calls_;
    calls->started({cluster_id_, response.header().revision()});
    return true;
  }
  Deliver(response);
  return true;
}

void EtcdWatch::Deliver(const etcdserverpb::WatchResponse& response) {
  std::vector<Registry::Event> events;
  for (const mvccpb::Event& from : response.events()) {
    if (from.kv().mod_revision() < next_revision_) continue;
    Registry::Event& event = events.emplace_back();
    event.deleted = from.type() == mvccpb::Event::DELETE;
    event.entry = {from.kv().key(), from.kv().value(), from.kv().mod_revision(), from.kv().lease()};
  }
  if (events.empty()) return;
  // All events of a revision come in one response: whatever is not later has been told.
  next_revision_ = events.back().entry.mod_revision + 1;
  const Calls calls = calls_;
  calls->events(std::move(events));
}

EtcdWatch::Calls EtcdWatch::EndedBy(const absl::Status& why) {
  Calls calls = std::move(calls_);
  const auto ended = std::move(ended_);
  const std::shared_ptr<EtcdWatch> self = shared_from_this();  // `ended` lets go of it.
  Stop();
  ended(why);
  return calls;
}

void EtcdWatch::Break(const absl::Status& why) {
  if (calls_ == nullptr) return;
  const Calls calls = EndedBy(why);
  calls->broken(why);
}

void EtcdWatch::Stop() {
  calls_ = nullptr;
  for (Loop::TimerId* timer : {&silence_timer_, &progress_timer_}) {
    if (*timer != 0) loop_.Cancel(std::exchange(*timer, 0));
  }
  if (stream_ != nullptr) std::exchange(stream_, nullptr)->Cancel();
}

}  // namespace kvmill
