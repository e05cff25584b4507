#include "service/etcd/etcd_registry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/etcd/etcd_calls.h"

namespace kvmill {
namespace {

using etcdserverpb::ResponseHeader;
using etcdserverpb::TxnRequest;
using etcdserverpb::TxnResponse;

constexpr std::int64_t kSilenceNanosMin = 1'000'000'000;

Registry::Header HeaderOf(const ResponseHeader& header) {
  return {header.cluster_id(), header.revision()};
}

Registry::Entry EntryOf(const mvccpb::KeyValue& kv) {
  return {kv.key(), kv.value(), kv.mod_revision(), kv.lease()};
}

absl::Status CheckKey(const std::string& key) {
  if (key.empty() || key.size() > Registry::kKeyBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("key or prefix of ", key.size(),
                                                   " bytes: want 1 to ", Registry::kKeyBytesMax));
  }
  return absl::OkStatus();
}

// A transaction that writes when `key` is as expected, and otherwise reads it.
TxnRequest Compared(const std::string& key, Registry::Revision expected) {
  TxnRequest request;
  etcdserverpb::Compare& compare = *request.add_compare();
  compare.set_result(etcdserverpb::Compare::EQUAL);
  compare.set_target(etcdserverpb::Compare::MOD);
  compare.set_key(key);
  compare.set_mod_revision(expected);
  request.add_failure()->mutable_request_range()->set_key(key);
  return request;
}

Registry::Written WrittenOf(const TxnResponse& response) {
  Registry::Written written;
  written.header = HeaderOf(response.header());
  written.done = response.succeeded();
  if (!written.done && response.responses_size() == 1 &&
      response.responses(0).response_range().kvs_size() == 1) {
    written.current = EntryOf(response.responses(0).response_range().kvs(0));
  }
  return written;
}

}  // namespace

EtcdRegistry::EtcdRegistry(std::unique_ptr<EtcdCalls> calls) : calls_(std::move(calls)) {}
EtcdRegistry::~EtcdRegistry() = default;

absl::StatusOr<std::unique_ptr<EtcdRegistry>> EtcdRegistry::Create(const EtcdOptions& options,
                                                                   Loop& loop) {
  absl::StatusOr<std::unique_ptr<EtcdServers>> servers = EtcdServers::Create(options);
  if (!servers.ok()) return servers.status();
  return std::unique_ptr<EtcdRegistry>(
      new EtcdRegistry(std::make_unique<EtcdCalls>(options, *std::move(servers), loop)));
}

Registry::CallId EtcdRegistry::Grant(std::int64_t seconds, std::int64_t deadline_nanos,
                                     Done<Lease> done) {
  using Request = etcdserverpb::LeaseGrantRequest;
  using Response = etcdserverpb::LeaseGrantResponse;
  if (seconds < kLeaseSecondsMin || seconds > kLeaseSecondsMax) {
    return calls_->Refuse(std::move(done), absl::InvalidArgumentError(absl::StrCat(
                                               "lease of ", seconds, " s: want ", kLeaseSecondsMin,
                                               " to ", kLeaseSecondsMax)));
  }
  Request request;
  request.set_ttl(seconds);
  return calls_->Unary<Lease, Request, Response>(
      std::move(request), deadline_nanos, std::move(done),
      [](EtcdServer& server, grpc::ClientContext* context, const Request* from, Response* to,
         std::function<void(grpc::Status)> ended) {
        server.lease->async()->LeaseGrant(context, from, to, std::move(ended));
      },
      [](const Response& response, const std::string& server) -> absl::StatusOr<Lease> {
        if (!response.error().empty() || response.id() == 0) {
          return absl::UnavailableError(
              absl::StrCat("etcd ", server, ": no lease: ", response.error()));
        }
        return Lease{HeaderOf(response.header()), response.id(), response.ttl()};
      });
}

Registry::CallId EtcdRegistry::KeepAlive(LeaseId lease, std::int64_t deadline_nanos,
                                         Done<Lease> done) {
  auto call = std::make_shared<KeepAliveEtcdCall<Lease>>();
  call->request.set_id(lease);
  call->deadline_nanos = deadline_nanos;
  call->done = std::move(done);
  call->answered = [lease](const etcdserverpb::LeaseKeepAliveResponse& response,
                           const std::string& server) -> absl::StatusOr<Lease> {
    if (response.ttl() <= 0) {
      return absl::NotFoundError(
          absl::StrCat("etcd ", server, ": lease ", absl::Hex(lease), " ended"));
    }
    return Lease{HeaderOf(response.header()), lease, response.ttl()};
  };
  return calls_->Start(std::move(call));
}

Registry::CallId EtcdRegistry::Revoke(LeaseId lease, std::int64_t deadline_nanos,
                                      Done<Header> done) {
  using Request = etcdserverpb::LeaseRevokeRequest;
  using Response = etcdserverpb::LeaseRevokeResponse;
  Request request;
  request.set_id(lease);
  return calls_->Unary<Header, Request, Response>(
      std::move(request), deadline_nanos, std::move(done),
      [](EtcdServer& server, grpc::ClientContext* context, const Request* from, Response* to,
         std::function<void(grpc::Status)> ended) {
        server.lease->async()->LeaseRevoke(context, from, to, std::move(ended));
      },
      [](const Response& response, const std::string&) -> absl::StatusOr<Header> {
        return HeaderOf(response.header());
      });
}

namespace {

void Txn(EtcdServer& server, grpc::ClientContext* context, const TxnRequest* from, TxnResponse* to,
         std::function<void(grpc::Status)> ended) {
  server.kv->async()->Txn(context, from, to, std::move(ended));
}

}  // namespace

Registry::CallId EtcdRegistry::Put(PutRequest request, std::int64_t deadline_nanos,
                                   Done<Written> done) {
  absl::Status checked = CheckKey(request.key);
  if (checked.ok() && request.value.size() > kValueBytesMax) {
    checked = absl::InvalidArgumentError(
        absl::StrCat("value of ", request.value.size(), " bytes: want at most ", kValueBytesMax));
  }
  if (checked.ok() && (request.lease == 0 || request.expected < 0)) {
    checked = absl::InvalidArgumentError(absl::StrCat(
        "put of ", request.key, ": want a lease, and an expected revision of at least 0"));
  }
  if (!checked.ok()) return calls_->Refuse(std::move(done), checked);
  TxnRequest txn = Compared(request.key, request.expected);
  etcdserverpb::PutRequest& put = *txn.add_success()->mutable_request_put();
  put.set_key(request.key);
  put.set_value(request.value);
  put.set_lease(request.lease);
  return calls_->Unary<Written, TxnRequest, TxnResponse>(
      std::move(txn), deadline_nanos, std::move(done), Txn,
      [put = std::move(request)](const TxnResponse& response,
                                 const std::string&) -> absl::StatusOr<Written> {
        Written written = WrittenOf(response);
        if (written.done) {
          written.current = Entry{put.key, put.value, written.header.revision, put.lease};
        }
        return written;
      });
}

Registry::CallId EtcdRegistry::Delete(std::string key, Revision expected,
                                      std::int64_t deadline_nanos, Done<Written> done) {
  absl::Status checked = CheckKey(key);
  if (checked.ok() && expected <= 0) {
    checked = absl::InvalidArgumentError(
        absl::StrCat("deletion of ", key, ": want an expected revision above 0"));
  }
  if (!checked.ok()) return calls_->Refuse(std::move(done), checked);
  TxnRequest txn = Compared(key, expected);
  txn.add_success()->mutable_request_delete_range()->set_key(key);
  return calls_->Unary<Written, TxnRequest, TxnResponse>(
      std::move(txn), deadline_nanos, std::move(done), Txn,
      [](const TxnResponse& response, const std::string&) -> absl::StatusOr<Written> {
        return WrittenOf(response);
      });
}

Registry::CallId EtcdRegistry::List(std::string prefix, std::int64_t deadline_nanos,
                                    Done<Listing> done) {
  using Request = etcdserverpb::RangeRequest;
  using Response = etcdserverpb::RangeResponse;
  if (const absl::Status checked = CheckKey(prefix); !checked.ok()) {
    return calls_->Refuse(std::move(done), checked);
  }
  Request request;
  request.set_key(prefix);
  request.set_range_end(EndOfPrefix(prefix));
  return calls_->Unary<Listing, Request, Response>(
      std::move(request), deadline_nanos, std::move(done),
      [](EtcdServer& server, grpc::ClientContext* context, const Request* from, Response* to,
         std::function<void(grpc::Status)> ended) {
        server.kv->async()->Range(context, from, to, std::move(ended));
      },
      [](const Response& response, const std::string&) -> absl::StatusOr<Listing> {
        Listing listing;
        listing.header = HeaderOf(response.header());
        for (const mvccpb::KeyValue& kv : response.kvs()) listing.entries.push_back(EntryOf(kv));
        return listing;
      });
}

Registry::CallId EtcdRegistry::Watch(std::string prefix, Revision from_revision,
                                     std::int64_t silence_nanos, WatchCalls calls) {
  EtcdWatch::Options options;
  options.prefix = std::move(prefix);
  options.from_revision = from_revision;
  options.silence_nanos = std::max(silence_nanos, kSilenceNanosMin);
  options.calls = std::move(calls);
  return calls_->Watch(std::move(options));
}

void EtcdRegistry::Cancel(CallId call) { calls_->Cancel(call); }

}  // namespace kvmill
