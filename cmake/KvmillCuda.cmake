# KVMILL_HAS_CUDA: whether kernels/cuda is compiled for devices. One clear line says what was decided and why.
set(KVMILL_HAS_CUDA FALSE)
if(KVMILL_CUDA STREQUAL "OFF")
  message(STATUS "kvmill: CUDA is off (KVMILL_CUDA=OFF); building for host devices only")
else()
  find_program(KVMILL_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
  if(KVMILL_NVCC)
    set(ENV{CUDACXX} "${KVMILL_NVCC}")  # check_language tries it in a project of its own; it may not work.
    include(CheckLanguage)
    set(CMAKE_MESSAGE_LOG_LEVEL WARNING)  # The line below says it.
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      find_package(CUDAToolkit REQUIRED)
    endif()
    unset(CMAKE_MESSAGE_LOG_LEVEL)
  endif()
  if(KVMILL_NVCC AND CMAKE_CUDA_COMPILER AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.5)  # Driver entry points by version.
    set(KVMILL_HAS_CUDA TRUE)
    message(STATUS "kvmill: CUDA is on (${KVMILL_NVCC}, ${CMAKE_CUDA_COMPILER_VERSION}); kernels for sm_80 and sm_90, no driver needed to build or start")
  elseif(KVMILL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "kvmill: KVMILL_CUDA=ON, but there is no nvcc (12.5 or later) that works on PATH or in /usr/local/cuda/bin; install the CUDA toolkit or use KVMILL_CUDA=AUTO")
  elseif(KVMILL_NVCC)
    message(STATUS "kvmill: CUDA is off (${KVMILL_NVCC} does not compile, or is older than 12.5); building for host devices only")
  else()
    message(STATUS "kvmill: CUDA is off (no nvcc found); building for host devices only")
  endif()
endif()

# kvmill_cuda_sources(TARGET KERNEL ...): adds kernels/cuda/KERNEL.cu to a library, or KERNEL_stub.cc in builds without
# CUDA. One pass of the compiler's front end makes code for sm_80 and sm_90, and PTX for what comes later. Products and
# sums are not contracted, so that devices and the host form (kernels/cuda/device.h) compute the same bits.
function(kvmill_cuda_sources target)
  if(NOT KVMILL_HAS_CUDA)
    foreach(kernel ${ARGN})
      target_sources(${target} PRIVATE cuda/${kernel}_stub.cc)
    endforeach()
    return()
  endif()
  set(sources ${ARGN})
  list(TRANSFORM sources PREPEND cuda/)
  list(TRANSFORM sources APPEND .cu)
  add_library(${target}_cuda OBJECT ${sources})
  set_target_properties(${target}_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_ARCHITECTURES OFF CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON)
  if(KVMILL_CCACHE)
    set_target_properties(${target}_cuda PROPERTIES CUDA_COMPILER_LAUNCHER "${KVMILL_CCACHE}")
  endif()
  target_include_directories(${target}_cuda PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_options(${target}_cuda PRIVATE -O3 --fmad=false -Werror=all-warnings
    "SHELL:-gencode arch=compute_80,code=[sm_80,sm_90,compute_80]" -Xcompiler=-Wall,-Wextra,-Werror)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_cuda>)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()
