#include "client/transport/ucx_wire.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "client/transport/ucx_handles.h"
#include "storage/core/check.h"

namespace kvmill {

ucs_memory_type_t UcxMemory(MemoryKind memory) {
  return memory == MemoryKind::kCuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

void UcxWires::Forget(ucp_ep_h endpoint, UcxWire* wire) {
  const auto found = by_endpoint_.find(endpoint);
  if (found != by_endpoint_.end() && found->second == wire) by_endpoint_.erase(found);
}

UcxWire* UcxWires::Find(ucp_ep_h endpoint) const {
  const auto found = by_endpoint_.find(endpoint);
  return found == by_endpoint_.end() ? nullptr : found->second;
}

void UcxWires::ForgetAttention(UcxWire* wire) {
  attention_.erase(std::remove(attention_.begin(), attention_.end(), wire), attention_.end());
}

bool UcxWires::Attend() {
  if (attention_.empty()) return false;
  while (!attention_.empty()) {
    UcxWire* const wire = attention_.back();
    ForgetAttention(wire);
    wire->Attend();
  }
  return true;
}

UcxWire::~UcxWire() {
  KVMILL_CHECK(outstanding_ == 0 && (endpoint_ == nullptr || close_done_));
  wires_->ForgetAttention(this);
}

absl::Status UcxWire::Make(ucp_ep_params_t* parameters) {
  parameters->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  parameters->err_mode = UCP_ERR_HANDLING_MODE_PEER;
  parameters->err_handler.cb = OnEndpointError;
  parameters->err_handler.arg = this;
  const ucs_status_t status = ucp_ep_create(wires_->worker(), parameters, &endpoint_);
  if (status != UCS_OK) return UcxError("connecting", status);
  wires_->Know(endpoint_, this);
  return absl::OkStatus();
}

absl::Status UcxWire::Dial(const SocketAddress& address) {
  ucp_ep_params_t parameters{};
  parameters.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  parameters.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  parameters.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address.storage);
  parameters.sockaddr.addrlen = address.bytes;
  return Make(&parameters);
}

absl::Status UcxWire::Accept(ucp_conn_request_h request) {
  ucp_ep_params_t parameters{};
  parameters.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  parameters.conn_request = request;
  return Make(&parameters);
}

std::string UcxWire::transport_name() const {
  return absl::StrJoin(UcxEndpointTransports(endpoint_), ",");
}

std::string UcxWire::peer_address() const {
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_REMOTE_SOCKADDR;
  if (ucp_ep_query(endpoint_, &attributes) != UCS_OK) return "unknown";
  SocketAddress address;
  address.storage = attributes.remote_sockaddr;
  address.bytes = address.is_ipv6() ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  return address.ToString();
}

UcxWire::Pending* UcxWire::Take(WireOperation* operation, absl::Span<const WirePiece> pieces) {
  std::unique_ptr<Pending> pending;
  if (free_.empty()) {
    pending = std::make_unique<Pending>();
    pending->wire = this;
  } else {
    pending = std::move(free_.back());
    free_.pop_back();
  }
  pending->operation = operation;
  pending->list.clear();
  if (pieces.size() > 1) {
    pending->list.reserve(pieces.size());
    for (const WirePiece& piece : pieces) {
      pending->list.push_back({.buffer = piece.data, .length = piece.bytes});
    }
  }
  ++outstanding_;
  return pending.release();
}

void UcxWire::Finish(Pending* pending, ucs_status_t status) {
  constexpr std::size_t kFreeMax = 64;
  WireOperation* const operation = pending->operation;
  --outstanding_;
  if (free_.size() < kFreeMax) {
    free_.emplace_back(pending);
  } else {
    delete pending;
  }
  // A receiver that does not want the bytes lets the sender's request end as cancelled: no failure,
  // while the endpoint lives.
  const bool unwanted = status == UCS_ERR_CANCELED && !close_wanted_ && error_ == UCS_OK;
  operation->OnDone(status == UCS_OK || unwanted ? absl::OkStatus()
                                                 : UcxError("the connection broke", status));
  if (close_wanted_ && outstanding_ == 0) wires_->NeedsAttention(this);
}

void UcxWire::Started(Pending* pending, ucs_status_ptr_t result) {
  if (result == nullptr) {
    Finish(pending, UCS_OK);
  } else if (UCS_PTR_IS_ERR(result)) {
    Finish(pending, UCS_PTR_STATUS(result));
  }
}

void UcxWire::OnSent(void* request, ucs_status_t status, void* pending) {
  ucp_request_free(request);
  auto* const ours = static_cast<Pending*>(pending);
  ours->wire->Finish(ours, status);
}

void UcxWire::OnReceived(void* request, ucs_status_t status, std::size_t /*bytes*/, void* pending) {
  ucp_request_free(request);
  auto* const ours = static_cast<Pending*>(pending);
  ours->wire->Finish(ours, status);
}

void UcxWire::Send(const Outgoing& message, WireOperation* operation) {
  if (close_wanted_) {
    operation->OnDone(absl::UnavailableError("the connection is closed"));
    return;
  }
  Pending* const pending = Take(operation, message.pieces);
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                            UCP_OP_ATTR_FIELD_DATATYPE;
  parameters.cb.send = OnSent;
  parameters.user_data = pending;
  // The reply endpoint is how the receiver knows whose message it is.
  parameters.flags = UCP_AM_SEND_FLAG_REPLY;
  parameters.flags |= message.rendezvous ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  parameters.memory_type = UcxMemory(message.memory);
  const void* buffer = nullptr;
  std::size_t count = 0;
  parameters.datatype = ucp_dt_make_contig(1);
  if (message.pieces.size() == 1) {
    buffer = message.pieces[0].data;
    count = message.pieces[0].bytes;
  } else if (!message.pieces.empty()) {
    buffer = pending->list.data();
    count = pending->list.size();
    parameters.datatype = ucp_dt_make_iov();
  }
  Started(pending,
          ucp_am_send_nbx(endpoint_, static_cast<unsigned>(message.channel), message.header.data(),
                          message.header.size(), buffer, count, &parameters));
}

void UcxWire::Receive(void* token, absl::Span<const WirePiece> pieces, MemoryKind memory,
                      WireOperation* operation) {
  if (close_wanted_) {
    operation->OnDone(absl::UnavailableError("the connection is closed"));
    return;
  }
  Pending* const pending = Take(operation, pieces);
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                            UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_DATATYPE;
  parameters.cb.recv_am = OnReceived;
  parameters.user_data = pending;
  parameters.memory_type = UcxMemory(memory);
  parameters.datatype = ucp_dt_make_contig(1);
  void* buffer = pieces[0].data;
  std::size_t count = pieces[0].bytes;
  if (pieces.size() > 1) {
    buffer = pending->list.data();
    count = pending->list.size();
    parameters.datatype = ucp_dt_make_iov();
  }
  Started(pending, ucp_am_recv_data_nbx(wires_->worker(), token, buffer, count, &parameters));
}

void UcxWire::Drop(void* token) { ucp_am_data_release(wires_->worker(), token); }

void UcxWire::Close() {
  if (close_wanted_) return;
  close_wanted_ = true;
  wires_->Forget(endpoint_, this);
  wires_->NeedsAttention(this);  // UCX may be in the middle of something.
}

void UcxWire::OnEndpointError(void* wire, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  auto* const ours = static_cast<UcxWire*>(wire);
  if (ours->error_ != UCS_OK) return;
  ours->error_ = status;
  ours->wires_->NeedsAttention(ours);
}

void UcxWire::OnEndpointClosed(void* request, ucs_status_t /*status*/, void* wire) {
  ucp_request_free(request);
  auto* const ours = static_cast<UcxWire*>(wire);
  ours->close_done_ = true;
  ours->wires_->NeedsAttention(ours);
}

void UcxWire::Attend() {
  if (error_ != UCS_OK && !error_told_) {
    error_told_ = true;
    if (!close_wanted_) events_->OnBroken(UcxError("the connection broke", error_));
  }
  if (close_wanted_ && !close_started_) {
    close_started_ = true;
    ucp_request_param_t parameters{};
    parameters.op_attr_mask =
        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    parameters.flags = UCP_EP_CLOSE_FLAG_FORCE;  // A peer that is stopped would never confirm.
    parameters.cb.send = OnEndpointClosed;
    parameters.user_data = this;
    const ucs_status_ptr_t result = ucp_ep_close_nbx(endpoint_, &parameters);
    if (result == nullptr || UCS_PTR_IS_ERR(result)) close_done_ = true;
  }
  if (close_done_ && outstanding_ == 0 && !closed_told_) {
    closed_told_ = true;
    events_->OnClosed();
  }
}

}  // namespace kvmill
