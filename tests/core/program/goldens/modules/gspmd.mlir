module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x8xf32> {jax.buffer_donor = true, mhlo.sharding = "{devices=[2,4]<=[8]}"}, %arg1: tensor<8x8xf32> {mhlo.sharding = "{devices=[8,1]<=[8]}"}, %arg2: tensor<8x8xf32> {mhlo.layout_mode = "{0,1}", mhlo.memory_kind = "pinned_host"}) -> (tensor<8x8xf32> {jax.result_info = "results[0]", mhlo.sharding = "{replicated}"}, tensor<8x8xf32> {jax.result_info = "results[1]"}) {
    %0 = stablehlo.custom_call @Sharding(%arg2) {mhlo.sharding = "{devices=[1,8]<=[8]}"} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %1 = stablehlo.add %arg0, %0 : tensor<8x8xf32>
    %2 = stablehlo.add %arg1, %1 : tensor<8x8xf32>
    return %2, %1 : tensor<8x8xf32>, tensor<8x8xf32>
  }
}
