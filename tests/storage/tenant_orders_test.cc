// What the orders of tenants with quotas take, however many tenants there are.
#include "storage/tenant_orders.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"

namespace kvmill {
namespace {

TEST(TenantOrdersTest, GhostsOfManyTenantsShareOneBudget) {
  constexpr std::uint32_t kEntries = 1u << 18;
  TenantOrders orders(
      {.policy = "returns", .entries_max = kEntries, .capacity_blocks = {1, kEntries, 1}});
  EXPECT_EQ(orders.bytes(), 0u);
  std::vector<TenantId> tenants(64);
  std::iota(tenants.begin(), tenants.end(), TenantId{0});
  orders.Track(tenants);
  const std::size_t empty = orders.bytes();
  EXPECT_GE(empty, 33u * kEntries) << "a node and a place each";
  for (const TenantId tenant : tenants) orders.Insert(tenant, Tier::kHost, tenant, {});
  // One policy alone, of a tier that has so many blocks, has ghosts of 8 bytes a block.
  EXPECT_GT(orders.bytes(), empty);
  EXPECT_LE(orders.bytes() - empty, 2u * 8u * kEntries);
  orders.Track({});
  EXPECT_EQ(orders.bytes(), 0u);
}

}  // namespace
}  // namespace kvmill
