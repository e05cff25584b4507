// The golden tiles of tests/data/golden: inputs, and what the public KVarN reference implementation
// made of them. Fields and their meaning: docs/formats.md, "Golden tiles".
#ifndef KVMILL_TESTS_KERNELS_GOLDEN_DATA_H_
#define KVMILL_TESTS_KERNELS_GOLDEN_DATA_H_

#include <cstddef>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvmill {

struct GoldenCase {
  std::string name;
  std::uint16_t head_dim = 0;
  std::uint16_t group = 0;
  std::map<std::string, std::vector<std::byte>> fields;

  bool Has(const std::string& field) const { return fields.count(field) != 0; }
  const std::vector<std::byte>& Field(const std::string& field) const { return fields.at(field); }
  std::vector<float> Floats(const std::string& field) const {
    const std::vector<std::byte>& bytes = Field(field);
    std::vector<float> floats(bytes.size() / sizeof(float));
    std::memcpy(floats.data(), bytes.data(), bytes.size());
    return floats;
  }
};

// All cases in the order of index.tsv. Throws when a file is missing or short: a test cannot go on
// without them.
inline std::vector<GoldenCase> LoadGoldenCases() {
  const std::string folder = std::string(KVMILL_SOURCE_DIR) + "/tests/data/golden/";
  std::ifstream index(folder + "index.tsv");
  if (!index) throw std::runtime_error("cannot read " + folder + "index.tsv");
  std::vector<GoldenCase> cases;
  std::string line;
  while (std::getline(index, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream columns(line);
    std::string name, field, dtype, shape, file;
    std::uint16_t head_dim = 0;
    std::uint16_t group = 0;
    std::size_t offset = 0;
    std::size_t byte_count = 0;
    columns >> name >> head_dim >> group >> field >> dtype >> shape >> file >> offset >> byte_count;
    if (!columns) throw std::runtime_error("index.tsv: cannot parse \"" + line + "\"");
    if (cases.empty() || cases.back().name != name) {
      cases.push_back({name, head_dim, group, {}});
    }
    std::vector<std::byte> bytes(byte_count);
    std::ifstream data(folder + file, std::ios::binary);
    data.seekg(static_cast<std::streamoff>(offset));
    data.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(byte_count));
    if (!data) throw std::runtime_error(folder + file + ": too short for " + field);
    cases.back().fields[field] = std::move(bytes);
  }
  return cases;
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_KERNELS_GOLDEN_DATA_H_
