// Names that tests of tickets share.
#ifndef KVMILL_TESTS_CLUSTER_TICKET_FIXTURE_H_
#define KVMILL_TESTS_CLUSTER_TICKET_FIXTURE_H_

#include <initializer_list>
#include <string>

#include "service/cluster/layer_set.h"
#include "service/cluster/member.h"
#include "service/cluster/ticket.h"

namespace kvmill::testing {

using State = TicketBlockState;

inline LayerSet Layers(std::initializer_list<std::size_t> layers) {
  LayerSet set;
  for (const std::size_t layer : layers) set.Add(layer);
  return set;
}

inline TicketBlock BlockNamed(const std::string& name, std::uint16_t layer_count = 3) {
  TicketBlock block;
  block.key = *BlockKey::FromBytes(name);
  block.layer_count = layer_count;
  block.token_count = 128;
  return block;
}

inline Member MemberNamed(const std::string& id) {
  Member member;
  member.id = id;
  member.incarnation = id + ".1";
  return member;
}

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLUSTER_TICKET_FIXTURE_H_
