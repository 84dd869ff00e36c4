// PRNG keys: the dimensions that only their buffers have are never cut
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x2xui32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}, %arg1: tensor<8x2xui32>, %arg2: tensor<8x2xui32> {mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"}, %arg3: tensor<8x2xui32>, %arg4: tensor<2xui32> {mhlo.sharding = "{replicated}"}) -> (tensor<8x2xui32> {mhlo.sharding = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"}, tensor<8x2xui32>, tensor<8x2xui32> {mhlo.sharding = "{replicated}"}, tensor<8x2xui32>, tensor<2xui32> {mhlo.sharding = "{replicated}"}) {
    %0 = stablehlo.custom_call @Sharding(%arg1) {backend_config = "unspecified_dims=[0]", mhlo.sharding = "{replicated}"} : (tensor<8x2xui32>) -> tensor<8x2xui32>
    %1 = stablehlo.custom_call @Sharding(%arg3) {backend_config = "unspecified_dims=[0]", mhlo.sharding = "{replicated}"} : (tensor<8x2xui32>) -> tensor<8x2xui32>
    %2 = stablehlo.custom_call @Sharding(%0) {backend_config = "unspecified_dims=[0]", mhlo.sharding = "{replicated}"} : (tensor<8x2xui32>) -> tensor<8x2xui32>
    %3 = stablehlo.optimization_barrier %2 : tensor<8x2xui32>
    %4 = stablehlo.custom_call @Sharding(%1) {backend_config = "unspecified_dims=[0]", mhlo.sharding = "{replicated}"} : (tensor<8x2xui32>) -> tensor<8x2xui32>
    %5 = stablehlo.optimization_barrier %4 : tensor<8x2xui32>
    return %arg0, %3, %arg2, %5, %arg4 : tensor<8x2xui32>, tensor<8x2xui32>, tensor<8x2xui32>, tensor<8x2xui32>, tensor<2xui32>
  }
}
