# kvmill_library, kvmill_binary and kvmill_test: the only ways this project adds targets.
# Flags live on the targets; nothing here sets a global one.

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(KVMILL_CCACHE ccache)
if(KVMILL_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${KVMILL_CCACHE}")
endif()
find_program(KVMILL_MOLD mold)

function(_kvmill_flags target warnings)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC "${PROJECT_SOURCE_DIR}")
  target_compile_options(${target} PRIVATE -fno-omit-frame-pointer -ffp-contract=off)
  if(warnings)
    target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wconversion -Werror
                           -Wno-missing-field-initializers)  # Designated initializers leave defaults out on purpose.
    if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
      target_compile_options(${target} PRIVATE -Wthread-safety)
    endif()
  endif()
  if(KVMILL_MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_link_options(${target} PRIVATE -fuse-ld=mold)
  endif()
  if(KVMILL_SANITIZE)
    string(REPLACE ";" "," sanitizers "${KVMILL_SANITIZE}")
    # A finding of UndefinedBehaviorSanitizer ends the program, as those of the others do.
    target_compile_options(${target} PRIVATE -fsanitize=${sanitizers} -fno-sanitize-recover=all -g1)
    target_link_options(${target} PUBLIC -fsanitize=${sanitizers})
  endif()
endfunction()

# kvmill_library(NAME SOURCES a.cc ... [PUBLIC libs ...] [PRIVATE libs ...] [NO_WARNINGS])
# NO_WARNINGS is for generated code only.
function(kvmill_library name)
  cmake_parse_arguments(arg "NO_WARNINGS" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${name} PUBLIC ${arg_PUBLIC} PRIVATE ${arg_PRIVATE})
  if(arg_NO_WARNINGS)
    _kvmill_flags(${name} FALSE)
  else()
    _kvmill_flags(${name} TRUE)
  endif()
endfunction()

# kvmill_binary(NAME SOURCES main.cc ... LINK libs ...): an executable in <build>/bin.
function(kvmill_binary name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINK})
  _kvmill_flags(${name} TRUE)
endfunction()

# kvmill_test(NAME SOURCES a_test.cc ... LINK libs ... [LABELS unit|stress|gpu ...] [TIMEOUT seconds] [ARGS ...])
# One GoogleTest program, one ctest entry. KVMILL_SOURCE_DIR and KVMILL_BIN_DIR are defined for finding test data and
# the programs under test.
function(kvmill_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LINK;LABELS;ARGS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINK} GTest::gmock GTest::gtest GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE KVMILL_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                                             KVMILL_BIN_DIR="${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
  _kvmill_flags(${name} TRUE)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)  # For what hangs; a busy machine is slow.
  endif()
  add_test(NAME ${name} COMMAND ${name} ${arg_ARGS})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
  if(KVMILL_SANITIZE)
    # Children of a test, the daemon among them, inherit this: the first finding ends a program.
    set_tests_properties(${name} PROPERTIES ENVIRONMENT
      "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp:halt_on_error=1:second_deadlock_stack=1;UBSAN_OPTIONS=print_stacktrace=1")
  endif()
endfunction()
